"""Observation of a script that does not use Paceline; see `paceline.observation`.

Python imports this module when it starts. An error in this module never ends the script.
"""

import importlib.util
import os
import sys
from importlib.machinery import PathFinder


def _next_sitecustomize() -> None:
    """Run the `sitecustomize` that Python would import without this folder, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120  pathlib takes long
    others = [each for each in sys.path if os.path.abspath(each or ".") != here]  # noqa: PTH100
    spec = PathFinder.find_spec("sitecustomize", others)
    if spec is None or spec.loader is None:
        return
    module = importlib.util.module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _observe() -> None:
    if not os.environ.get("PACELINE_OBSERVE"):
        return
    try:
        from paceline.train.observing.start import watch
    except ImportError as error:
        if "RANK" in os.environ:
            sys.stderr.write(
                f"paceline: rank {os.environ['RANK']} is not observed: {error}; install paceline "
                f"for {sys.executable}\n"
            )
        return
    watch()


try:
    _observe()
finally:
    _next_sitecustomize()
