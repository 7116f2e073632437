"""Training script of `overhead.py`: alternates steps of plain DDP and of a session.

It writes the times of the steps to a file for each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.gpu_cases import paired

# Width of the model. Small, so that steps are short and the overhead of a session is visible.
HIDDEN = 32


def main(folder: Path, pairs: int) -> None:
    """Train, and write the times to the folder."""
    dist.init_process_group("gloo")
    made, rank = paired("cpu", pairs, HIDDEN), dist.get_rank()
    part = folder / f"rank-{rank}.part"
    part.write_text(json.dumps(made))
    part.rename(folder / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
