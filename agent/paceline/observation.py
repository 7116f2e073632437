"""Environment variables that `paceline observe` sets for the ranks of an observed script.

The folder `SITE` is first on PYTHONPATH, so Python imports its module `sitecustomize` at start-up.
That module makes `paceline.train.observing` watch PyTorch. The script is not changed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

# Environment variable that is set to a nonempty text in the processes of an observed run.
VARIABLE = "PACELINE_OBSERVE"
# Environment variable with the name of this node: `paceline observe` runs on one node.
NODE = "PACELINE_NODE"
SITE = Path(__file__).parent / "site"


def observed(variables: Mapping[str, str]) -> bool:
    """Return True if a process with these environment variables belongs to an observed run."""
    return bool(variables.get(VARIABLE))


def extended(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables with additions, so that Python processes are observed."""
    path = variables.get("PYTHONPATH")
    parts = [str(SITE), *([path] if path else [])]
    return {**variables, VARIABLE: "1", "PYTHONPATH": os.pathsep.join(parts)}
