"""Real ranks: processes joined by gloo, started once, that run many cases."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Any

from paceline.node.processes import number_of, reserved_port

if TYPE_CHECKING:
    import socket

# What almost every case imports: each rank is a fork of a process that has it.
_PRELOADED = ["torch", "torch._dynamo.trace_rules", "paceline.train.session", "pytest"]

_PATIENCE_S = 8.0


class RankError(AssertionError):
    """A case raised on some rank; the message holds the tracebacks."""


class Ranks:
    """`world` processes with a process group; restarted when a case fails.

    A case is a function of a module that can be imported; it runs on every rank at once and finds
    its rank in the process group.

    Args:
        start: how processes start: "forkserver", or "spawn", which CUDA needs.
    """

    def __init__(self, world: int, backend: str = "gloo", start: str = "forkserver") -> None:
        self.world = world
        self._backend = backend
        self._context: Any = multiprocessing.get_context(start)
        self._context.set_forkserver_preload(_PRELOADED)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._reserved: socket.socket | None = None  # the port of the ranks' store

    def run(
        self,
        case: Callable[..., Any],
        *args: Any,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> list[Any]:
        """What the case returned on each rank.

        Args:
            case: called with `args` on every rank.
            env: extra environment variables while it runs.
            timeout_s: after that the ranks are killed.

        Raises:
            RankError: it raised somewhere, or did not end in time.
        """
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((case, args, dict(env or {})))
        except OSError as error:
            self.stop()
            raise RankError("a rank had died before the case began") from error
        deadline = time.monotonic() + timeout_s
        answers: dict[int, tuple[bool, Any]] = {}
        while len(answers) < self.world:
            waiting = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
            ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for pipe in ready:
                answers[self._pipes.index(pipe)] = fine, _ = self._answer(pipe)
                if not fine:  # its peers should notice soon
                    deadline = min(deadline, time.monotonic() + _PATIENCE_S)
        if len(answers) == self.world and all(fine for fine, _ in answers.values()):
            return [answers[rank][1] for rank in range(self.world)]
        self.stop()
        missing = [f"rank {rank} did not end" for rank in range(self.world) if rank not in answers]
        failed = [f"rank {rank}: {text}" for rank, (fine, text) in answers.items() if not fine]
        raise RankError("\n".join(failed + missing))

    def _answer(self, pipe: Connection) -> tuple[bool, Any]:
        try:
            return pipe.recv()
        except (EOFError, ConnectionResetError):
            return False, "died"

    def _start(self) -> None:
        self._reserved = reserved_port()
        port = number_of(self._reserved)
        for rank in range(self.world):
            here, there = self._context.Pipe()
            process = self._context.Process(
                target=_serve, args=(rank, self.world, port, there, self._backend), daemon=False
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for pipe in self._pipes:
            pipe.close()
        if self._reserved is not None:
            self._reserved.close()
        self._processes, self._pipes = [], []


def hang(*_: Any) -> None:
    """A case that never ends."""
    threading.Event().wait()


def _serve(rank: int, world: int, port: int, pipe: Connection, backend: str) -> None:
    import torch
    import torch.distributed as dist

    multiprocessing.set_start_method("fork", force=True)  # of data loader workers, as in a script
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    if backend == "nccl":
        torch.cuda.set_device(0)
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world)
    # Collections, and searches for optimisers, pass over what torch's modules hold.
    gc.collect()
    gc.freeze()
    while True:
        try:
            case, args, env = pipe.recv()
        except EOFError:  # the tests are over
            return
        try:
            with _environment(env):
                answer: tuple[bool, Any] = True, case(*args)
        except Exception:
            answer = False, traceback.format_exc()
        _save_coverage()
        pipe.send(answer)


def _save_coverage() -> None:
    """After each case, as ranks are killed in the end."""
    coverage = sys.modules.get("coverage")  # `make coverage`
    measured = coverage and coverage.Coverage.current()
    if measured:
        measured.save()


@contextlib.contextmanager
def _environment(extra: Mapping[str, str]) -> Iterator[None]:
    from paceline.train import environment

    before = dict(os.environ)
    os.environ.update(extra)
    environment._taken.clear()  # each case stands for a process of its own
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
