"""examples/speech: what it reads, how it batches, and that padding changes no output."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import wave
from collections.abc import Sequence
from itertools import combinations, pairwise
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

EXAMPLE = Path(__file__).parents[2] / "examples" / "speech"


def module(name: str) -> ModuleType:
    """A file of the example, under a name that no other example has."""
    spec = importlib.util.spec_from_file_location(f"speech_{name}", EXAMPLE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


data, model = module("data"), module("model")


def record(path: Path, samples: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(8000)
        file.writeframes(np.full(samples, 1000, "<i2").tobytes())


def test_reads_speech_but_no_silence_and_nothing_too_short(tmp_path: Path) -> None:
    sounds = tmp_path / "sounds" / "usr" / "share"
    for number in range(10):
        record(sounds / "en_US_f_Allison" / "digits" / f"{number}.wav", 1600 * (number + 1))
        record(sounds / "ru_RU_f" / f"{number}.wav", 3200)
    record(sounds / "ru_RU_f" / "silence" / "1.wav", 8000)
    record(sounds / "ru_RU_f" / "short.wav", 800)
    train, held_out = (data.Speech(tmp_path, train=part) for part in (True, False))
    assert (len(train), len(held_out)) == (16, 4)
    items = train.items + held_out.items
    assert sorted(language for _, language in items) == [0] * 10 + [4] * 10
    frames = sorted(len(spectrogram) for spectrogram, language in items if language == 0)
    assert frames == [1 + 10 * (number + 1) for number in range(10)]
    assert train.sizes == [len(spectrogram) for spectrogram, _ in train.items]
    assert {spectrogram.shape[1] for spectrogram, _ in items} == {data.BANDS}
    # The second time they come from the cache.
    (tmp_path / "sounds").rename(tmp_path / "elsewhere")
    again = data.Speech(tmp_path, train=True)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(again.items, train.items, strict=True))


def test_says_how_to_get_the_recordings(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"run examples/speech/fetch\.sh first"):
        data.Speech(tmp_path, train=True)


def test_outputs_and_gradients_do_not_depend_on_padding() -> None:
    torch.manual_seed(0)
    net = model.SpeechNet(data.BANDS, 5)
    lengths = [7, 12, 41]
    items = [(torch.randn(n, data.BANDS), 0) for n in lengths]
    together = net(*data.collate(items)[:2])
    alone = torch.cat([net(*data.collate([item])[:2]) for item in items])
    assert torch.allclose(together, alone, atol=1e-6)
    weights = list(net.parameters())
    for a, b in zip(
        torch.autograd.grad(together.sum(), weights),
        torch.autograd.grad(alone.sum(), weights),
        strict=True,
    ):
        assert torch.allclose(a, b, atol=1e-5)


def test_length_grouped_batches_hold_each_sample_once() -> None:
    sizes = np.random.default_rng(0).integers(1, 1000, 110).tolist()
    ranks = [data.LengthGrouped(sizes, 2, rank, 8, seed=0) for rank in range(2)]
    orders = [list(rank) for rank in ranks]
    assert [len(order) for order in orders] == [len(rank) for rank in ranks] == [55, 55]
    assert sorted(orders[0] + orders[1]) == list(range(110))
    spans = []
    for start in range(0, 48, 8):
        batch = [sizes[i] for order in orders for i in order[start : start + 8]]
        spans.append((min(batch), max(batch)))
    spans.sort()
    assert all(a[1] <= b[0] for a, b in pairwise(spans))
    ranks[0].set_epoch(1)
    assert list(ranks[0]) != orders[0]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=5, max_size=9).map(sorted),
    parts=st.integers(1, 4),
)
def test_no_other_cut_has_a_cheaper_dearest_part(lengths: list[int], parts: int) -> None:
    def dearest(cuts: Sequence[int]) -> int:
        edges = [0, *cuts, len(lengths)]
        return max((b - a) * lengths[b - 1] for a, b in pairwise(edges))

    cuts = data.cut_evenly(lengths, parts)
    assert len(cuts) == parts - 1
    assert list(cuts) == sorted({*cuts}) and not {0, len(lengths)} & {*cuts}
    others = combinations(range(1, len(lengths)), parts - 1)
    assert dearest(cuts) == min(dearest(other) for other in others)


def test_sorted_cut_has_plain_ddps_global_batches() -> None:
    sizes = np.random.default_rng(0).lognormal(4, 1, 110).astype(int).tolist()
    plain = [torch.utils.data.DistributedSampler(range(110), 2, rank, seed=3) for rank in range(2)]
    ranks = [data.SortedCut(sizes, 2, rank, 8, seed=3) for rank in range(2)]
    for epoch in range(2):
        for sampler in (*plain, *ranks):
            sampler.set_epoch(epoch)
        orders = [list(sampler) for sampler in plain]
        for step, (short, long) in enumerate(zip(*ranks, strict=True)):
            whole = [i for order in orders for i in order[8 * step : 8 * step + 8]]
            assert sorted(short + long) == sorted(whole)
            assert ranks[0].global_size(step) == len(whole)
            assert max(sizes[i] for i in short) <= min(sizes[i] for i in long)
    assert step + 1 == len(ranks[0]) == len(ranks[1])


def test_without_apt_fetch_says_where_the_recordings_are(tmp_path: Path) -> None:
    binaries = tmp_path / "bin"
    binaries.mkdir()
    (binaries / "bash").symlink_to("/bin/bash")
    ended = subprocess.run(
        ["/bin/bash", EXAMPLE / "fetch.sh", tmp_path / "data"],
        env={**os.environ, "PATH": str(binaries)},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert "asterisk-core-sounds-it-wav" in ended.stderr
    assert not (tmp_path / "data").exists()
