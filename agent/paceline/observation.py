"""What `paceline observe` and the ranks of an observed script agree on through the environment.

Python imports `sitecustomize` of the folder `SITE` when it starts, because the folder is first on
PYTHONPATH. That module lets `paceline.train.observing` watch PyTorch. The script is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

VARIABLE = "PACELINE_OBSERVE"  # set: this process is part of an observed run
NODE = "PACELINE_NODE"  # the only node of the run, by its name
SITE = Path(__file__).parent / "site"


def observed(variables: Mapping[str, str]) -> bool:
    """Whether a process with these variables is part of an observed run."""
    return bool(variables.get(VARIABLE))


def extended(variables: Mapping[str, str]) -> dict[str, str]:
    """The variables with those that let processes be observed."""
    path = variables.get("PYTHONPATH")
    parts = [str(SITE), *([path] if path else [])]
    return {**variables, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(parts)}
