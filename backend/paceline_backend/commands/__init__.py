"""What the command line of a control plane does.

`access` (tokens, `open`) and `database` are groups of commands; `parts` starts the processes of
`paceline server`.
"""
