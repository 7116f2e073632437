"""One base for all that Paceline raises on purpose."""

from typing import ClassVar


class PacelineError(Exception):
    """Something the user or operator can mend; the message names what and how.

    The command line prints the message as one line and ends with `exit_code`: 3, the environment
    is not fit, unless a subclass says otherwise.
    """

    exit_code: ClassVar[int] = 3


class InputError(PacelineError):
    """What was asked for is wrong: a missing script, a misspelt policy."""

    exit_code = 2
