"""Environment variables that `paceline observe` sets for the ranks of an observed script.

Python imports `sitecustomize` of the folder `SITE` when it starts, because the folder is first on
PYTHONPATH. That module makes `paceline.train.observing` watch PyTorch. The script is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Environment variable that is set in the processes of an observed run.
VARIABLE = "PACELINE_OBSERVE"
# Environment variable with the name of the run's only node.
NODE = "PACELINE_NODE"
SITE = Path(__file__).parent / "site"


def observed(variables: Mapping[str, str]) -> bool:
    """Return True if a process with these variables is part of an observed run."""
    return bool(variables.get(VARIABLE))


def extended(variables: Mapping[str, str]) -> dict[str, str]:
    """Return a copy of the variables, with those added that make processes observed."""
    path = variables.get("PYTHONPATH")
    parts = [str(SITE), *([path] if path else [])]
    return {**variables, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(parts)}
