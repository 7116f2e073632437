"""A fork waits until no other thread imports a module, or forbids it for a while."""

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
from paceline.core.forking import delay_forks, no_fork
from paceline.data import Sharded
from paceline.data.prefetcher import Prefetcher
from support.waiting import until

FORK: Any = multiprocessing.get_context("fork")
MODULE = "slow_module"


@pytest.fixture
def fork_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """An event that is set when a fork waits. Only then the import of `MODULE` ends."""
    delay_forks()
    waits = threading.Event()
    others = forking._others_are_critical

    def asked() -> bool:
        critical = others()
        if critical:
            waits.set()
        return critical

    monkeypatch.setattr(forking, "_others_are_critical", asked)
    monkeypatch.setattr(sys.modules["__main__"], "fork_waits", waits, raising=False)
    code = "import sys\nsys.modules['__main__'].fork_waits.wait(60)\n"
    (tmp_path / f"{MODULE}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield waits
    sys.modules.pop(MODULE, None)


@contextmanager
def importing() -> Iterator[None]:
    """A thread that imports `MODULE` from now on."""
    thread = threading.Thread(target=importlib.import_module, args=[MODULE])
    thread.start()
    until(lambda: MODULE in sys.modules, "the thread imports")
    yield
    thread.join(60)


def imports_in_a_forked_process() -> bool:
    process = FORK.Process(target=importlib.import_module, args=[MODULE])
    process.start()
    process.join(60)
    process.kill()
    return bool(process.exitcode == 0)


def test_a_fork_waits_for_an_import(fork_waits: threading.Event) -> None:
    with importing():
        assert imports_in_a_forked_process()
    assert fork_waits.is_set()


def test_a_fork_waits_for_a_thread_that_forbids_it(fork_waits: threading.Event) -> None:
    entered, left = threading.Event(), threading.Event()

    def forbid() -> None:
        with no_fork(), no_fork():
            entered.set()
            fork_waits.wait(60)
            left.set()

    thread = threading.Thread(target=forbid)
    thread.start()
    assert entered.wait(60)
    process = FORK.Process(target=lambda: sys.exit(not left.is_set()))
    process.start()
    process.join(60)
    thread.join(60)
    assert process.exitcode == 0


def test_a_thread_that_forbids_forks_may_fork(fork_waits: threading.Event) -> None:
    def again() -> None:
        with no_fork():
            pass

    with no_fork():
        process = FORK.Process(target=again)
        process.start()
    process.join(60)
    assert process.exitcode == 0
    assert not fork_waits.is_set()


def test_a_fork_waits_only_for_some_time(
    fork_waits: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forking, "_MOST_S", 0.0)
    monkeypatch.setattr(forking, "_others_are_critical", lambda: True)
    with importing():
        process = FORK.Process(target=int)
        process.start()
        process.join(60)
        assert process.exitcode == 0
        fork_waits.set()


def test_a_thread_may_fork_while_it_imports(tmp_path: Path, fork_waits: threading.Event) -> None:
    (tmp_path / f"{MODULE}.py").write_text(
        "import os\nif child := os.fork():\n    os.waitpid(child, 0)\nelse:\n    os._exit(0)\n"
    )
    importlib.import_module(MODULE)
    assert not fork_waits.is_set()


class Importing:
    """A source that imports `MODULE` when it is read."""

    def __len__(self) -> int:
        return 4

    def size(self, index: int) -> int:
        return 1

    def read(self, index: int) -> bytes:
        importlib.import_module(MODULE)
        return b"x"


def test_a_loader_forks_while_the_prefetcher_reads_for_the_first_time(
    tmp_path: Path, fork_waits: threading.Event
) -> None:
    """Otherwise its worker process would wait forever for the thread's import."""
    data = Sharded(Importing(), directory=tmp_path / "data", limit_bytes=1)
    prefetcher = Prefetcher(data, data.directory.claim(data.lengths), filler=0)
    until(lambda: MODULE in sys.modules, "the thread imports")
    loader: DataLoader[Any] = DataLoader(
        data,  # type: ignore[arg-type]
        num_workers=1,
        timeout=60,
        multiprocessing_context="fork",
    )
    assert sum(len(batch) for batch in loader) == len(data)
    prefetcher.close()
