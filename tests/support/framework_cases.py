"""What scripts of frameworks do alike: try what is refused, and run the example."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Callable, Iterator

from paceline import PacelineError


@contextlib.contextmanager
def refused(said: list[str]) -> Iterator[None]:
    """Adds what a refusal within says; "nothing" where nothing is refused."""
    try:
        yield
    except (PacelineError, TypeError, ValueError) as error:
        said.append(str(error))
    else:
        said.append("nothing")


def printed(example: Callable[[], None]) -> list[str]:
    """What an example's main function prints, with Paceline and without."""
    outputs = []
    for more in ([], ["--plain"]):
        sys.argv = ["example", "--epochs=1", *more]
        with contextlib.redirect_stdout(io.StringIO()) as out:
            example()
        outputs.append(out.getvalue())
    return outputs
