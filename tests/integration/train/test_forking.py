"""A fork waits until no thread of ours imports modules or calls the script for the first time."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from paceline.core import forking
from paceline.core.forking import no_fork
from paceline.data import Sharded
from paceline.data.prefetcher import Prefetcher
from support.waiting import until

FORK: Any = multiprocessing.get_context("fork")


class Busy:
    """A thread inside `no_fork`, until it is told to leave."""

    def __init__(self) -> None:
        self.entered, self.leave, self.left = (threading.Event() for _ in range(3))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self.entered.wait(60)

    def _run(self) -> None:
        with no_fork():
            self.entered.set()
            self.leave.wait(60)
            self.left.set()

    def join(self) -> None:
        self.leave.set()
        self._thread.join(60)


def forked(busy: Busy | None = None) -> tuple[bool, bool]:
    """Whether a thread had left at the fork, and whether the forked process can enter itself."""
    ours, theirs = FORK.Pipe()

    def child() -> None:
        with no_fork():
            theirs.send(busy is None or busy.left.is_set())

    process = FORK.Process(target=child)
    process.start()
    entered = ours.poll(60)
    result = entered and ours.recv()
    process.kill()
    process.join()
    return result, entered


def test_a_fork_waits_for_the_thread() -> None:
    busy = Busy()
    with told(busy.leave):
        assert forked(busy) == (True, True)
    busy.join()


@contextmanager
def told(begun: threading.Event) -> Iterator[None]:
    """Set the event when a fork asks for the lock."""
    lock = forking._forks.lock

    class Telling:
        def acquire(self, timeout: float) -> bool:
            begun.set()
            return lock.acquire(timeout=timeout)

        release, __enter__, __exit__ = lock.release, lock.__enter__, lock.__exit__

    forking._forks.lock = Telling()  # type: ignore[assignment]
    try:
        yield
    finally:
        forking._forks.lock = lock


class Importing:
    """A source that imports a module at its first read; the import ends when a fork has begun."""

    def __init__(self, folder: Path) -> None:
        (folder / "slow_module.py").write_text(
            "import sys\nsys.modules['__main__'].fork_begun.wait(60)\n"
        )

    def __len__(self) -> int:
        return 4

    def size(self, index: int) -> int:
        return 1

    def read(self, index: int) -> bytes:
        importlib.import_module("slow_module")
        return b"x"


def test_a_loader_forks_while_the_prefetcher_reads_for_the_first_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise its worker process would wait forever for the thread's import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    begun = threading.Event()
    monkeypatch.setattr(sys.modules["__main__"], "fork_begun", begun, raising=False)
    data = Sharded(Importing(tmp_path), directory=tmp_path / "data", limit_bytes=1)
    with told(begun):
        prefetcher = Prefetcher(data, data.directory.claim(data.lengths), filler=0)
        until(lambda: "slow_module" in sys.modules, "the thread imports")
        loader = DataLoader(data, num_workers=1, timeout=60, multiprocessing_context="fork")  # type: ignore[arg-type,var-annotated]
        assert sum(len(batch) for batch in loader) == len(data)
        prefetcher.close()
    del sys.modules["slow_module"]


def test_a_thread_that_stays_delays_forks_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_MOST_S", 0.01)
    busy = Busy()
    assert forked(busy) == (False, True), "the fork goes on, and the forked process can enter"
    assert forking._forks.late
    monkeypatch.setattr(forking, "_MOST_S", 3600.0)
    assert forked(busy) == (False, True), "later forks do not wait"
    busy.join()
    assert not forking._forks.late
    assert forked() == (True, True)


def test_a_thread_may_fork_inside() -> None:
    with no_fork():
        assert forked() == (True, True)
