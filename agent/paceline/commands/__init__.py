"""Commands of the command line, and the code that they share.

`options` defines shared options, `printing` output formats, and `linking` connects to the bus.
`paceline.cli` imports and registers the commands of `starting`, `switching` and `runs`. Each of the
other modules has a function `register(app)`, which is an entry point of the group
`paceline.commands`.
"""
