"""The base classes of all errors that Paceline raises on purpose."""

from typing import ClassVar


class PacelineError(Exception):
    """An error that the user or operator can fix; the message names the problem and the fix.

    The command line prints the message as one line and exits with `exit_code`. The default, 3,
    means that the environment is not suitable.
    """

    exit_code: ClassVar[int] = 3


class InputError(PacelineError):
    """An error in the user's input, such as a missing script or a misspelt policy."""

    exit_code = 2


class MissingExtraError(PacelineError, ModuleNotFoundError):
    """An error because the packages of one of Paceline's extras are not installed.

    `needs` is the module or command that requires them, `reason` names the missing package.
    """

    def __init__(self, needs: str, extra: str, reason: object) -> None:
        super().__init__(
            f"{needs} needs packages that are not installed ({reason}): "
            f"pip install 'paceline[{extra}]'"
        )
