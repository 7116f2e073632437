"""A rank of `overhead.py`: plain DDP's and a session's steps in turn; their times go to a file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.gpu_cases import paired

HIDDEN = 32  # width of the model; its step is short, so what a session adds is seen


def main(folder: Path, pairs: int) -> None:
    """Trains, and leaves the times in the folder."""
    dist.init_process_group("gloo")
    made, rank = paired("cpu", pairs, HIDDEN), dist.get_rank()
    part = folder / f"rank-{rank}.part"
    part.write_text(json.dumps(made))
    part.rename(folder / f"rank-{rank}.json")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
