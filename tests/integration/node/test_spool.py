"""What a spool holds when its writer's process is gone, or the disk is full."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from paceline.node.spool import drain

Fields = dict[bytes, bytes]


def drained(directory: Path, include_open: bool = False) -> list[Fields]:
    out: list[Fields] = []
    assert drain(directory, out.append, include_open=include_open) == len(out)
    return out


def test_an_open_chunk_is_left_alone_until_its_writer_is_gone(tmp_path: Path) -> None:
    code = """if True:
        import os, pathlib, sys
        from paceline.node.spool import Spool
        Spool(pathlib.Path(sys.argv[1]), "rank0", 1000).append({b"data": b"last words"})
        os._exit(0)
    """
    subprocess.run([sys.executable, "-c", code, tmp_path], check=True)
    assert drained(tmp_path) == []
    assert drained(tmp_path, include_open=True) == [{b"data": b"last words"}]


def test_a_full_disk_costs_only_what_was_refused(tmp_path: Path) -> None:
    """A limit on the size of files cuts a write short, as a full disk does."""
    code = """if True:
        import pathlib, resource, signal, sys
        from paceline.node.spool import Spool
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        spool = Spool(pathlib.Path(sys.argv[1]), "rank0", 1 << 20)
        def append(number):
            return spool.append({b"data": b"%d:" % number + b"x" * 200})
        kept = [append(number) for number in range(3)]
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (spool._open_bytes + 100, hard))
        kept.append(append(3))
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        kept += [append(number) for number in range(4, 6)]
        spool.close()
        print(kept)
    """
    done = subprocess.run([sys.executable, "-c", code, tmp_path], check=True, capture_output=True)
    assert done.stdout.decode().strip() == str([True] * 3 + [False] + [True] * 2)
    left = [fields[b"data"][:1] for fields in drained(tmp_path)]
    assert left == [b"0", b"1", b"2", b"4", b"5"]
