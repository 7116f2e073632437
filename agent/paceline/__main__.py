"""`python -m paceline`: the command line."""

from paceline.cli import main

main()
