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


class MissingExtraError(PacelineError, ModuleNotFoundError):
    """The packages of one of Paceline's extras are not installed.

    Args:
        needs: what cannot work without them: a module or a command.
        extra: that has them.
        reason: what is missing.
    """

    def __init__(self, needs: str, extra: str, reason: object) -> None:
        super().__init__(
            f"{needs} needs packages that are not installed ({reason}): "
            f"pip install 'paceline[{extra}]'"
        )
