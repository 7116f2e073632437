"""What the commands of `paceline.cli` share, and commands of its own.

`options` has what several commands take, `printing` what they print, `lines` prints logs, and
`linking` is how they come to the bus. `starting` has the commands that start a script. Each of the
others has `register(app)`, an entry point of the group `paceline.commands`.
"""
