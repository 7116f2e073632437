"""What the commands of `paceline.cli` share, and commands of its own.

`options` has what several commands take, `printing` what they print, `lines` prints logs, and
`linking` is how they come to the bus. `run` is the main command. Each of the others has
`register(app)`, an entry point of the group `paceline.commands`.
"""
