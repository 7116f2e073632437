"""`Stream`, a data set without a length and without an index: samples come one after the other.

On each rank, `train.streams.reader.StreamReader` reads the rank's samples through a `Reading`. If
ranks share the source, they claim its shards, or blocks of its samples, through the `Reading`, so
that no two ranks train the same sample.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, Protocol

import numpy as np

from paceline.core.errors import PacelineError
from paceline.core.streaming.reading import PARTS, Claim, SeenSamples

logger = logging.getLogger(__name__)

# Number of consecutive samples that a rank claims at once, if the source has no shards.
CLAIMED_SAMPLES = 64

# A function that takes the number of shards and returns this rank's next claim, or None if no data
# is left to claim.
Claiming = Callable[[int], "Claim | None"]


class Reading(Protocol):
    """Reader of those samples of a source that one rank trains."""

    # Seed of the shards' random order; None: shards are read in the listed order.
    seed: int | None

    @property
    def pieces(self) -> int | None:
        """Return the number of shards or blocks that ranks can claim; None if they claim none."""
        ...

    def samples(self, epoch: int, claim: Claiming) -> Iterator[Any]:
        """Yield the samples of this rank in an epoch, in order.

        If other ranks read parts of the same shard, yield its `ShardOrder` after its samples. Ranks
        compare the digests in these objects, to check that they read the samples in the same order.
        """
        ...


class Stream:
    """Data set of `Session` that has no length and no index.

    Give each rank the same arguments. ``Stream(dataset, size=…, split=…)`` accepts every object
    that yields samples, such as a ``torch.utils.data.IterableDataset``. If the source is in shards,
    use `Stream.shards`: each rank reads shards at the speed at which it trains, so that all ranks
    finish the epoch together.

    Args:
        source: yields samples, and can be iterated over again in each epoch. Its
            ``set_epoch(epoch)``, if it has one, is called before each epoch.
        size: returns the size λ > 0 of a sample: its cost relative to other samples.
        split: "ranks": on each rank the source yields that rank's own samples, as after
            ``split_by_node``. "none": on each rank the source yields all samples in the same order;
            each rank reads all of them and keeps its own.
        buffer: number of samples that all ranks together hold in memory, and from which each step's
            samples are chosen.
        shuffle: if True, a rank's samples leave its buffer in a random order, which depends on the
            session's seed.

    Raises:
        TypeError, ValueError: an argument is wrong; the message names it.
    """

    def __init__(
        self,
        source: Iterable[Any],
        *,
        size: Callable[[Any], float],
        split: str,
        buffer: int = 2048,
        shuffle: bool = True,
    ) -> None:
        if split not in ("ranks", "none"):
            raise ValueError(
                f"split={split!r}: give 'ranks' if the source yields each rank's own part, or "
                "'none' if it yields all samples on each rank"
            )
        if isinstance(source, Iterator) or not hasattr(source, "__iter__"):
            raise TypeError(
                f"source is {type(source).__name__}: give an iterable that can be iterated again "
                "in each epoch, not an iterator or a generator"
            )
        self.reading: Reading = Whole(source) if split == "none" else Own(source)
        self.kind = f"stream, split={split!r}"
        self._set(size, buffer, shuffle)

    def _set(self, size: Callable[[Any], float], buffer: int, shuffle: bool) -> None:
        if not callable(size):
            raise TypeError(f"size={size!r}: give a function of a sample that returns a number")
        if not isinstance(buffer, int) or isinstance(buffer, bool) or buffer < 1:
            raise ValueError(
                f"buffer={buffer!r}: give the number of samples that all ranks together hold ready"
            )
        if not isinstance(shuffle, bool):
            raise TypeError(f"shuffle={shuffle!r}: give True or False")
        self.size, self.buffer, self.shuffle = size, buffer, shuffle

    @classmethod
    def shards(
        cls,
        shards: Sequence[Any],
        open: Callable[[Any], Iterable[Any]],  # noqa: A002
        *,
        size: Callable[[Any], float],
        buffer: int = 2048,
        shuffle: bool = True,
    ) -> Stream:
        """Make a stream from a source that consists of shards, such as tar files.

        When a rank's buffer has room, the rank reads the next shard that no rank has claimed.
        Towards the epoch's end several ranks may read the same shard; each trains a different part
        of its samples. For errors see `Stream`.

        Args:
            shards: arguments for `open`, the same on all ranks: paths, URLs, numbers.
            open: opens a shard; returns its samples, in the same order each time (otherwise a
                warning is logged). Its ``set_epoch(epoch)``, if it has one, is called before each
                epoch.
            size: see `Stream`.
            buffer: see `Stream`.
            shuffle: see `Stream`; if True, shards are also read in a random order, which differs
                between epochs.
        """
        if not hasattr(shards, "__len__"):
            raise TypeError(f"shards is {type(shards).__name__}: give a list of shards")
        if isinstance(shards, str) or not len(shards):
            raise ValueError("shards: give a list of at least one shard")
        if not callable(open):
            raise TypeError(f"open={open!r}: give a function of a shard that yields its samples")
        stream = cls.__new__(cls)
        stream.reading = Sharding(list(shards), open)
        stream.kind = f"stream of {len(shards)} shards{_names(shards)}"
        stream._set(size, buffer, shuffle)
        return stream

    @classmethod
    def of_hugging_face(
        cls,
        dataset: Any,
        *,
        size: Callable[[Any], float],
        buffer: int = 2048,
        shuffle: bool = True,
    ) -> Stream:
        """Make a stream from ``datasets.load_dataset(…, streaming=True)``.

        The data set must not be split by rank: ranks claim its shards, as in `Stream.shards`. If
        the data set has only one shard, each rank reads all samples and keeps its own. For the
        arguments and errors see `Stream`.
        """
        if not (hasattr(dataset, "num_shards") and hasattr(dataset, "shard")):
            raise TypeError(
                f"dataset is {type(dataset).__name__}: give a datasets.IterableDataset, as "
                "load_dataset(…, streaming=True) returns it"
            )
        # The attribute is private; a test checks that the public split_dataset_by_node sets it.
        split = getattr(dataset, "_distributed", None)
        if getattr(split, "world_size", 1) > 1:
            raise ValueError(
                "dataset is already split by rank: give the data set from before "
                "split_dataset_by_node, since ranks claim its shards, or give Stream(dataset, "
                "size=…, split='ranks')"
            )
        count: int = dataset.num_shards
        if count < 2:
            logger.warning(
                "the data set has one shard, which cannot be split: each rank reads all of it and "
                "keeps its own samples"
            )
            stream = cls(dataset, size=size, split="none", buffer=buffer, shuffle=shuffle)
        else:
            opens = _HuggingFace(dataset, count)
            stream = cls.shards(range(count), opens, size=size, buffer=buffer, shuffle=shuffle)
        stream.kind += _shuffled(dataset)
        return stream


class _HuggingFace:
    """Opener of the shards of a ``datasets.IterableDataset``; reading processes can unpickle it."""

    def __init__(self, dataset: Any, count: int) -> None:
        self._dataset, self._count, self._epoch = dataset, count, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __call__(self, index: int) -> Iterable[Any]:
        shard: Iterable[Any] = self._dataset.shard(num_shards=self._count, index=index)
        # A shard does not inherit the epoch of its data set.
        _set_epoch(shard, self._epoch)
        return shard


class Own:
    """Reader of a source that yields each rank's own samples."""

    seed: int | None = None
    pieces: int | None = None

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    def samples(self, epoch: int, claim: Claiming) -> Iterator[Any]:
        """Yield this rank's samples; see `Reading.samples`."""
        _set_epoch(self._source, epoch)
        return iter(self._source)


class Whole:
    """Reader of a source that yields all samples on each rank; ranks claim blocks of samples."""

    seed: int | None = None
    # The number of blocks is unknown; this is larger than the number of blocks of any source.
    pieces: int = 2**40

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = source

    def samples(self, epoch: int, claim: Claiming) -> Iterator[Any]:
        """Yield this rank's samples; see `Reading.samples`."""
        _set_epoch(self._source, epoch)
        ahead = enumerate(self._source)
        held = next(ahead, None)
        while held is not None and (block := claim(self.pieces)) is not None:
            first, end = block.shard * CLAIMED_SAMPLES, (block.shard + 1) * CLAIMED_SAMPLES
            while held is not None and held[0] < end:
                if held[0] >= first and block.has(held[0]):
                    yield held[1]
                held = next(ahead, None)


class Sharding:
    """Reader of a source in shards."""

    def __init__(self, shards: list[Any], open_shard: Callable[[Any], Iterable[Any]]) -> None:
        self._shards, self.open_shard = shards, open_shard
        self.seed: int | None = None
        self.pieces = len(shards)

    def samples(self, epoch: int, claim: Claiming) -> Iterator[Any]:
        """Yield this rank's samples; see `Reading.samples`."""
        _set_epoch(self.open_shard, epoch)
        order = np.arange(len(self._shards))
        if self.seed is not None:
            order = np.random.default_rng((self.seed, epoch)).permutation(order)
        while (piece := claim(len(order))) is not None:
            name = self._shards[order[piece.shard]]
            yield from self._read(name, piece, checks_order=epoch == 0)

    def _read(self, name: Any, piece: Claim, *, checks_order: bool) -> Iterator[Any]:
        """Yield the samples of a shard that belong to a claim.

        With `checks_order`, also yield the shard's `ShardOrder`, if other ranks read other parts of
        the shard. Checking takes time for each sample, so it is done in one epoch only.
        """
        number = 0
        seen = SeenSamples() if checks_order and piece.end - piece.first < PARTS else None
        try:
            shard = self.open_shard(name)
            if shard is None:
                raise TypeError(f"open({name!r}) returned None: return an iterable of its samples")
            for sample in shard:
                if seen is not None:
                    seen.add(sample)
                if piece.has(number):
                    yield sample
                number += 1
        # The script's own code may raise any error.
        except Exception as error:
            raise PacelineError(
                f"shard {name!r}, after {number} samples: {type(error).__name__}: {error}"
            ) from error
        if seen is not None:
            yield seen.order(piece.shard, repr(name))


def _names(shards: Sequence[Any]) -> str:
    """Return a text with a digest of the shards' names; empty if a shard has no name."""
    try:
        names = "\0".join(map(_name, shards))
    except TypeError:
        return ""
    return f" (names {_digest(names)})"


def _name(shard: Any) -> str:
    """Return the name of a shard, which is a path, a number, or a list or mapping of these."""
    if isinstance(shard, str | int | PurePath):
        return str(shard)
    if isinstance(shard, Mapping):
        return repr(sorted((_name(field), _name(path)) for field, path in shard.items()))
    if isinstance(shard, list | tuple):
        return repr([_name(part) for part in shard])
    raise TypeError(f"a shard is {type(shard).__name__}")


def _shuffled(dataset: Any) -> str:
    """Return a text with a digest of a Hugging Face data set's random generators.

    Ranks compare the texts, because ``dataset.shuffle()`` without a seed draws a different order on
    each rank. The generators are in private attributes; if none is found, the text is empty, and
    the order is not compared.
    """
    states, pending, seen = [], [dataset], set()
    while pending:
        if id(at := pending.pop()) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, np.random.Generator):
            states.append(repr(at.bit_generator.state))
        elif isinstance(at, list | tuple):
            pending += at
        elif type(at).__module__ == "datasets.iterable_dataset":
            pending += vars(at).values()
    text = f", shuffled by random numbers {_digest(''.join(states))} (give shuffle a seed)"
    return text if states else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:12]


def _set_epoch(source: Any, epoch: int) -> None:
    if callable(set_epoch := getattr(source, "set_epoch", None)):
        set_epoch(epoch)
