"""Random numbers of a sample, which do not depend on the rank and process that loads the sample.

`session.loader()` sets the current epoch in each process that loads samples: its own process, and
the DataLoader's workers. So data sets can call `generator`, `numpy_generator` and `seeded` without
a reference to the session::

    def __getitem__(self, index):
        noise = torch.randn(WIDTH, generator=paceline.generator(index))
        return self.inputs[index] + noise, self.labels[index]
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from typing import SupportsIndex

import numpy as np
import torch

from paceline.core.terms import whole

_LARGEST = 2**63 - 1

# The epoch whose samples this process loads. The variable is not thread-local, because a data set
# may use threads.
_loaded: Epoch | None = None


class Epoch:
    """The current epoch of a session's loader, and the session's seed.

    A process loads samples inside of ``with epoch:``, which must not be nested for the same object.
    DataLoader workers may live for several epochs. With `shared`, `number` is in shared memory, so
    that such workers see each change.
    """

    def __init__(self, seed: int, *, shared: bool) -> None:
        self.seed = seed
        # The epoch in whose context this one was entered, to be restored on exit.
        self._outer: Epoch | None = None
        self._number = torch.zeros((), dtype=torch.int64)
        if shared:
            self._number.share_memory_()  # type: ignore[no-untyped-call]

    @property
    def number(self) -> int:
        """Return the number of the epoch, from 0."""
        return int(self._number)

    @number.setter
    def number(self, number: int) -> None:
        self._number.fill_(number)

    def __enter__(self) -> None:
        global _loaded
        assert _loaded is not self
        self._outer, _loaded = _loaded, self

    def __exit__(self, *_: object) -> None:
        global _loaded
        _loaded = self._outer


class WorkerInit:
    """The ``worker_init_fn`` of a session's DataLoader; it calls the script's own one last."""

    def __init__(self, epoch: Epoch, then: Callable[[int], object] | None) -> None:
        self._epoch, self._then = epoch, then

    def __call__(self, worker: int) -> None:
        """Initialise a worker, in its process."""
        global _loaded
        _loaded = self._epoch
        if self._then is not None:
            self._then(worker)


class Use(IntEnum):
    """Use of a sample's random numbers. Each use has a random sequence of its own.

    `DATA`: generators that the data set requests. `GLOBAL`: the global random numbers of torch,
    NumPy and Python, in `seeded`. `LOOP`: generators that the loop's body requests
    (`Session.generator`).
    """

    DATA = 0
    GLOBAL = 1
    LOOP = 2


def generator(
    index: SupportsIndex, device: torch.device | str = "cpu", *, stream: int = 0
) -> torch.Generator:
    """Return a torch generator for one sample, for data sets that `Session.loader` reads.

    The numbers depend only on the session's seed, the epoch, the index and `stream`. So they are
    the same on each rank, with any number of ranks and DataLoader workers, and after a restart, but
    differ between epochs. Each call with the same arguments returns a new generator with the same
    numbers. If a sample needs several generators, give each a `stream` of its own.

    If no session's loader reads the data set, as in a plain DataLoader, the seed is drawn from
    torch's own random numbers.

    Args:
        index: index of the sample in the data set.
        device: the generator's device.
        stream: number of the sample's sequence of random numbers; sequences are independent.

    Raises:
        TypeError, ValueError: `index` or `stream` is no whole number ≥ 0.
    """
    return torch_generator(_sequence(index, Use.DATA, stream), device)


def numpy_generator(index: SupportsIndex, *, stream: int = 0) -> np.random.Generator:
    """Return a NumPy generator for one sample; see `generator`."""
    return np.random.default_rng(_sequence(index, Use.DATA, stream))


@contextmanager
def seeded(index: SupportsIndex, *, stream: int = 0) -> Iterator[None]:
    """Seed the global random numbers of torch (CPU), NumPy and Python for a sample, until exit.

    Use `seeded` for transforms that accept no generator, such as those of torchvision. The numbers
    differ from those of `generator`. Afterwards the process's own random numbers continue as if
    nothing had been drawn. Only one thread at a time may use `seeded`::

        def __getitem__(self, index):
            with paceline.seeded(index):
                return self.transform(self.images[index]), self.labels[index]

    Raises:
        TypeError, ValueError: see `generator`.
    """
    sequence = _sequence(index, Use.GLOBAL, stream)
    of_torch, of_numpy, of_python = torch.get_rng_state(), np.random.get_state(), random.getstate()
    number = _number(sequence)
    # Do not call torch.manual_seed: it would also seed GPUs, whose random numbers the script uses.
    torch.default_generator.manual_seed(number)
    np.random.seed(sequence.generate_state(4))
    random.seed(number)
    try:
        yield
    finally:
        torch.set_rng_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def sequence_of(
    seed: int, epoch: int, index: SupportsIndex, use: Use = Use.DATA, stream: int = 0
) -> np.random.SeedSequence:
    """Return the seed sequence of a sample; different arguments give different sequences."""
    # Always give the seed as two words of 32 bits, so that different arguments cannot give the same
    # list of words.
    low, high = seed % 2**32, seed >> 32
    own = use, whole("stream", stream, 0)
    return np.random.SeedSequence((low, high, epoch, _checked(index)), spawn_key=own)


def torch_generator(
    sequence: np.random.SeedSequence, device: torch.device | str
) -> torch.Generator:
    """Return torch's generator for a seed sequence."""
    return torch.Generator(device).manual_seed(_number(sequence))


def _sequence(index: SupportsIndex, use: Use, stream: int) -> np.random.SeedSequence:
    if _loaded is not None:
        return sequence_of(_loaded.seed, _loaded.number, index, use, stream)
    _checked(index), whole("stream", stream, 0)
    return np.random.SeedSequence(int(torch.randint(_LARGEST, ())))


def _checked(index: SupportsIndex) -> int:
    try:
        return whole("index", operator.index(index), 0)
    except TypeError:
        raise TypeError(f"index is {index!r}: it must be a whole number") from None


def _number(sequence: np.random.SeedSequence) -> int:
    return int(sequence.generate_state(1, np.uint64)[0])
