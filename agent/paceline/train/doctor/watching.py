"""Records what a script does, by wrapping functions of Paceline and torch.

`Examination` calls `watch` before the script starts. The wrappers fill a `ScriptRecord` and end the
script after its examined steps; the checks read the record afterwards.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from paceline.train import session as sessions
from paceline.train.batch_limits import sizes
from paceline.train.loader import Loader, _Batches
from paceline.train.proof import ProofResult, Rehearsal
from paceline.train.session import Session
from paceline.train.stacks import is_users


@dataclass
class SeenSession:
    """A session that the script made, and the script's use of it.

    `where` is the line that made the session, such as "train.py:30". `checkpoint` is the line that
    called `Session.checkpoint`, and `state` the line that read or set the session's state.
    """

    where: str
    # The session; None if Paceline refused it.
    session: Session | None = None
    dataset: Any = None
    # Sizes of the samples, [samples]; known on rank 0 only.
    sizes: npt.NDArray[np.float64] | None = None
    sizes_from: str = ""
    calls: list[Calls] = field(default_factory=list)
    # The session's loader, once the script has started to read it.
    loader: Loader | None = None
    steps: int = 0
    checkpoint: str = ""
    # The rehearsal that is running after the examined steps.
    rehearsal: Rehearsal | None = None
    answer: ProofResult | None = None
    state: str = ""


@dataclass
class ScriptRecord:
    """Record of a script's use of sessions, loaders and optimisers."""

    sessions: list[SeenSession] = field(default_factory=list)
    # Lines at which the script iterates over a DataLoader of its own.
    other_loaders: list[str] = field(default_factory=list)
    # Number of steps of each optimiser outside of any session, by the optimiser's `id`.
    outside: dict[int, int] = field(default_factory=dict)
    # Number of optimiser steps within a session's step, and the `id`s of the optimisers'
    # parameters.
    inside: int = 0
    stepped: set[int] = field(default_factory=set)
    warnings: list[logging.LogRecord] = field(default_factory=list)
    failed: bool = False

    def of(self, session: Any) -> SeenSession | None:
        """Return the record of a session; None if there is none."""
        return next((seen for seen in self.sessions if seen.session is session), None)


def watch(seen: ScriptRecord, folder: Path, steps: int, end: Callable[[], NoReturn]) -> None:
    """Install the wrappers, which fill `seen` for as long as the process lives.

    Checkpoints are saved in `folder` instead of the script's own folder. After `steps` steps, `end`
    is called and raises the exception that ends the script.
    """
    _note_sessions(seen)
    _note_models(seen)
    _note_checkpoints(seen, folder)
    _note_loaders(seen, steps, end)
    _note_optimisers(seen, steps, end)
    logging.getLogger("paceline").addHandler(_Noting(seen))


class _Noting(logging.Handler):
    def __init__(self, seen: ScriptRecord) -> None:
        super().__init__(logging.WARNING)
        self._seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self._seen.warnings.append(record)


def _note_sessions(seen: ScriptRecord) -> None:
    resolved = sizes.resolve

    def make(original: Any) -> Any:
        def init(session: Session, dataset: Any, **options: Any) -> None:
            made = SeenSession(where(), dataset=dataset)
            seen.sessions.append(made)

            def resolve(given: Any, data: Any) -> npt.NDArray[np.float64]:
                made.sizes_from = _source(given, data)
                made.sizes = resolved(given, data)
                return made.sizes

            _put(sessions, "resolve", lambda _: resolve)
            original(session, dataset, **options)
            made.session = session

        return init

    _put(Session, "__init__", make)


def _source(sizes: Any, dataset: Any) -> str:
    if isinstance(sizes, str):
        return "dataset.sizes" if hasattr(dataset, "sizes") else ""
    return "a function of each sample" if callable(sizes) else "Session(sizes=…)"


def _note_models(seen: ScriptRecord) -> None:
    def make(original: Any) -> Any:
        def wrap(session: Session, model: nn.Module, **options: Any) -> nn.Module:
            wrapped: nn.Module = original(session, model, **options)
            known = seen.of(session)
            if known is not None:
                known.calls.append(Calls(model, lambda: in_step(session)))
            return wrapped

        return wrap

    _put(Session, "wrap", make)


def _note_checkpoints(seen: ScriptRecord, folder: Path) -> None:
    def checkpoint(original: Any) -> Any:
        def instead(session: Session, directory: Any, *args: Any, **options: Any) -> None:
            known = seen.of(session)
            if known is not None:
                known.checkpoint = where()
            own = folder / f"checkpoints-{len(seen.sessions)}"
            original(session, own, *args, **options)

        return instead

    def state(original: Any) -> Any:
        def noted(session: Session, *args: Any, **options: Any) -> Any:
            known = seen.of(session)
            if known is not None:
                known.state = where()
            return original(session, *args, **options)

        return noted

    _put(Session, "checkpoint", checkpoint)
    for name in ("state_dict", "load_state_dict"):
        _put(Session, name, state)


def _note_loaders(seen: ScriptRecord, steps: int, end: Callable[[], NoReturn]) -> None:
    def of_session(original: Any) -> Any:
        def passing(loader: Loader) -> Generator[Any]:
            known = next(
                (s for s in seen.sessions if s.session and s.session._loop is loader._loop), None
            )
            inner: Generator[Any] = original(loader)
            if known is None:
                return inner
            # The loader must not check the loss itself: a rehearsal checks it after the examined
            # steps.
            loader.proves = False
            return _watched(known, loader, inner, steps, end)

        return passing

    def of_torch(original: Any) -> Any:
        def iterate(loader: DataLoader[Any]) -> Any:
            if not isinstance(loader.batch_sampler, _Batches):
                seen.other_loaders.append(where())
            return original(loader)

        return iterate

    _put(Loader, "__iter__", of_session)
    _put(DataLoader, "__iter__", of_torch)


def _watched(
    known: SeenSession,
    loader: Loader,
    inner: Generator[Any],
    steps: int,
    end: Callable[[], NoReturn],
) -> Generator[Any]:
    known.loader = loader
    try:
        for batch in inner:
            yield batch
            running = loader._loop.current.running
            if running is not None and running.step.more:
                continue
            for calls in known.calls:
                calls.close()
            known.steps += 1
            if known.steps >= steps:
                if known.answer is None:
                    yield from _rehearsed(known, loader)
                inner.close()
                end()
        # The epoch ended before all examined steps. Check the loss now, because there may be no
        # further epoch.
        if known.steps and known.answer is None:
            yield from _rehearsed(known, loader)
    finally:
        inner.close()


def _rehearsed(known: SeenSession, loader: Loader) -> Generator[Any]:
    known.rehearsal = Rehearsal(loader._loop, loader)
    yield from known.rehearsal.batches()
    known.answer, known.rehearsal = known.rehearsal.answer, None


def _note_optimisers(seen: ScriptRecord, steps: int, end: Callable[[], NoReturn]) -> None:
    def stepped(optimiser: torch.optim.Optimizer, *_: Any) -> None:
        if any(s.session is not None and in_step(s.session) for s in seen.sessions):
            seen.inside += 1
            seen.stepped |= {id(p) for group in optimiser.param_groups for p in group["params"]}
            return
        if not any(s.loader is not None for s in seen.sessions):
            made = seen.outside[id(optimiser)] = seen.outside.get(id(optimiser), 0) + 1
            if made >= steps:
                end()

    register_optimizer_step_post_hook(stepped)


def in_step(session: Session) -> bool:
    """Return whether the script is in a step of the session's loop."""
    return session._loop.current.running is not None


def where() -> str:
    """Return the line of user code that is running, as ``file:line``."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _put(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


class Calls:
    """Record of a model's calls in training steps, until `close`."""

    def __init__(self, model: nn.Module, in_step: Callable[[], bool]) -> None:
        self.model = model
        self.called = False
        self.draws = False
        # Hash of torch's random state before the model's first call.
        self.random = ""
        # The dtype of the autocast that was active in a call; None: there was none.
        self.autocast: torch.dtype | None = None
        self._in_step = in_step
        self._before = ""
        self._hooks = [
            model.register_forward_pre_hook(_Hook(self._begins)),
            model.register_forward_hook(_Hook(self._ends)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begins(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step():
            return
        self._before = random_state()
        self.random = self.random or self._before

    def _ends(self, *_: Any) -> None:
        if torch.compiler.is_compiling() or not self._in_step():
            return
        self.autocast = self.autocast or _autocast()
        self.called = True
        self.draws |= random_state() != self._before


class _Hook:
    """A module hook that does nothing in a copy or an unpickled instance of the module.

    So calls of a copy, such as a teacher model, are not recorded as calls of the model.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass


def random_state() -> str:
    """Return a hash of torch's random state, of the CPU and of this rank's GPU."""
    state = hashlib.sha256(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state.update(torch.cuda.get_rng_state().numpy().tobytes())
    return state.hexdigest()


def _autocast() -> torch.dtype | None:
    for kind in ("cuda", "cpu"):
        if torch.is_autocast_enabled(kind):
            return torch.get_autocast_dtype(kind)
    return None
