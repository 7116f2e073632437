"""Telephone prompts in five languages: 2,780 recordings of 0.2 to 86 s, one speaker a language.

Read from Debian's asterisk-core-sounds packages, which `fetch.sh` downloads. A sample is a log-mel
spectrogram, and its size is its number of frames.
"""

import itertools
import os
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

LANGUAGES = ("en", "es", "fr", "it", "ru")
BANDS = 24  # of the mel spectrogram
RATE = 8000  # samples a second
WINDOW, HOP = 256, 160  # samples; a frame is 20 ms
SHORTEST_S = 0.2

Item = tuple[torch.Tensor, int]


def folder() -> Path:
    """Where `fetch.sh` keeps the recordings by default."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "paceline" / "speech"


def _filters() -> torch.Tensor:
    """Triangular mel filters [bins, BANDS] from 60 Hz to half the sampling rate."""
    mels = np.linspace(1127 * np.log1p(60 / 700), 1127 * np.log1p(RATE / 2 / 700), BANDS + 2)
    edges = 700 * np.expm1(mels / 1127)
    bins = np.linspace(0, RATE / 2, WINDOW // 2 + 1)[:, None]
    rising = (bins - edges[:-2]) / (edges[1:-1] - edges[:-2])
    falling = (edges[2:] - bins) / (edges[2:] - edges[1:-1])
    return torch.tensor(np.maximum(0, np.minimum(rising, falling)), dtype=torch.float32)


def log_mel(path: Path, filters: torch.Tensor) -> torch.Tensor:
    """The log-mel spectrogram [frames, BANDS] of a 16-bit mono recording."""
    with wave.open(str(path)) as recording:
        samples = np.frombuffer(recording.readframes(recording.getnframes()), "<i2")
    signal = torch.tensor(samples, dtype=torch.float32) / 2**15
    window = torch.hann_window(WINDOW)
    spectrum = torch.stft(signal, WINDOW, HOP, window=window, return_complex=True)
    return torch.log(spectrum.abs().square().T @ filters + 1e-6)


def _recordings(sounds: Path) -> Iterator[tuple[Path, int]]:
    """Paths and languages; silence, which is the same in each language, is left out."""
    for path in sorted(sounds.rglob("*.wav")):
        voice = next((p for p in path.parts if p[:2] in LANGUAGES and p[2:3] == "_"), None)
        if voice and path.parent.name != "silence":
            yield path, LANGUAGES.index(voice[:2])


def prepare(data: Path) -> list[Item]:
    """All spectrograms with their languages; computed once and kept in `data`."""
    kept = data / f"log-mel-{BANDS}-{HOP}.pt"
    if kept.exists():
        loaded: list[Item] = torch.load(kept)
        return loaded
    if not (data / "sounds").is_dir():
        raise SystemExit(f"no recordings in {data}: run examples/speech/fetch.sh first")
    filters, items = _filters(), []
    for path, language in _recordings(data / "sounds"):
        if path.stat().st_size >= SHORTEST_S * RATE * 2:
            items.append((log_mel(path, filters), language))
    # Several ranks may do this at once; each writes a file of its own, then renames it.
    partial = kept.with_suffix(f".{os.getpid()}")
    torch.save(items, partial)
    partial.rename(kept)
    return items


class Speech(Dataset[Item]):
    """One part of a random 80:20 split; items are (spectrogram [frames, BANDS], language)."""

    def __init__(self, data: Path, train: bool) -> None:
        items = prepare(data)
        order = np.random.default_rng(0).permutation(len(items))
        # An even number: DistributedSampler would repeat a sample for the second of two ranks.
        cut = len(items) * 4 // 5 // 2 * 2
        everything = torch.cat([items[i][0] for i in order[:cut]])
        mean, deviation = everything.mean(0), everything.std(0)
        chosen = order[:cut] if train else order[cut:]
        self.items = [((items[i][0] - mean) / deviation, items[i][1]) for i in chosen]
        self.sizes = [len(spectrogram) for spectrogram, _ in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Item:
        return self.items[index]


def collate(items: list[Item]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Pads to the longest: spectrograms [n, longest, BANDS], lengths [n], languages [n]."""
    spectrograms = torch.nn.utils.rnn.pad_sequence([s for s, _ in items], batch_first=True)
    lengths = torch.tensor([len(s) for s, _ in items])
    return spectrograms, lengths, torch.tensor([language for _, language in items])


class LengthGrouped(Sampler[int]):
    """Batches of samples of similar length, as Hugging Face's DistributedLengthGroupedSampler has.

    The epoch is shuffled and sorted by length in pools, the sorted pool is cut into global batches,
    and these are shuffled. Each rank takes every `world`-th sample of a global batch, so that all
    ranks have samples of similar length in a step.

    Args:
        sizes: of the samples.
        world: number of ranks.
        rank: which one this is.
        batch: samples of one rank in a step.
        seed: of the order.
        pool: global batches that are sorted together; Hugging Face's upper limit is 50.
    """

    def __init__(
        self, sizes: list[int], world: int, rank: int, batch: int, seed: int, pool: int = 50
    ) -> None:
        self.sizes, self.world, self.rank = sizes, world, rank
        self.global_batch = batch * world
        self.seed, self.pool, self.epoch = seed, pool, 0

    def set_epoch(self, epoch: int) -> None:
        """The next order."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.sizes) // self.world

    def __iter__(self) -> Iterator[int]:
        rng = np.random.default_rng([self.seed, self.epoch])
        order, width = rng.permutation(len(self.sizes)), self.global_batch * self.pool
        full: list[np.ndarray] = []
        for start in range(0, len(order), width):
            pool = order[start : start + width]
            ranked = pool[np.argsort([-self.sizes[i] for i in pool], kind="stable")]
            full += [
                ranked[i : i + self.global_batch] for i in range(0, len(ranked), self.global_batch)
            ]
        # The incomplete batch stays the last one, since a DataLoader cuts batches by count.
        last = [full.pop()] if len(full[-1]) < self.global_batch else []
        batches = [full[i] for i in rng.permutation(len(full))] + last
        yield from np.concatenate(batches)[self.rank :: self.world][: len(self)].tolist()


def cut_evenly(lengths: list[int], parts: int) -> list[int]:
    """Cut ascending lengths so that the dearest part's padded cost, count × longest, is least.

    Returns:
        Where each part but the first begins; no part is empty.
    """

    def cuts_of(limit: int) -> list[int]:
        cuts, begin = [], 0
        for at, length in enumerate(lengths):
            if at > begin and (at + 1 - begin) * length > limit:
                cuts.append(at)
                begin = at
        return cuts

    low, high = lengths[-1], len(lengths) * lengths[-1]
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cuts_of(middle)) < parts else (middle + 1, high)
    cuts = cuts_of(low)
    while len(cuts) < parts - 1:  # one long recording alone sets the limit: halve the largest part
        edges = [0, *cuts, len(lengths)]
        count, begin = max((b - a, a) for a, b in itertools.pairwise(edges))
        cuts = sorted([*cuts, begin + count // 2])
    return cuts


class SortedCut(Sampler[list[int]]):
    """Local batches of plain DDP's global batches, sorted by length and cut at equal padded cost.

    Each global batch has the samples that `DistributedSampler` gives to all ranks in that step.
    Ranks get different numbers of them, so the script scales its loss.

    Args:
        sizes: of the samples.
        world: number of ranks.
        rank: of this process.
        batch: samples of a global batch, over `world`.
        seed: of the order.
    """

    def __init__(self, sizes: list[int], world: int, rank: int, batch: int, seed: int) -> None:
        self.sizes, self.world, self.rank = sizes, world, rank
        self.global_batch = batch * world
        self.order = DistributedSampler(range(len(sizes)), 1, 0, seed=seed)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch's order."""
        self.order.set_epoch(epoch)

    def __len__(self) -> int:
        return len(range(0, len(self.sizes), self.global_batch))

    def global_size(self, step: int) -> int:
        """Return the number of samples of all ranks in a step of the epoch."""
        return min(self.global_batch, len(self.sizes) - step * self.global_batch)

    def __iter__(self) -> Iterator[list[int]]:
        order = list(self.order)
        for start in range(0, len(order), self.global_batch):
            batch = sorted(order[start : start + self.global_batch], key=self.sizes.__getitem__)
            cuts = cut_evenly([self.sizes[i] for i in batch], self.world)
            edges = [0, *cuts, len(batch)]
            yield batch[edges[self.rank] : edges[self.rank + 1]]
