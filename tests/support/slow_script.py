"""`several_script.py` on nodes of which some are slow.

Each sample takes `UNIT_S` in the forward pass, and three times as long on a node for which there is
a file DIRECTORY/slow-NODE. The arguments are those of `several_script.py`.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_hook

UNIT_S = 0.015
FACTOR = 3


def main() -> None:
    node = json.loads(os.environ["PACELINE_PLACEMENT"])[int(os.environ["RANK"])]
    slow = Path(sys.argv[1], f"slow-{node}")

    def hold(module: nn.Module, batches: Any, _: Any) -> None:
        if isinstance(module, nn.Tanh):
            [batch] = batches
            time.sleep(UNIT_S * len(batch) * (FACTOR if slow.exists() else 1))

    register_module_forward_hook(hold)
    runpy.run_path(str(Path(__file__).with_name("several_script.py")), run_name="__main__")


if __name__ == "__main__":
    main()
