"""Random numbers of a sample, where no session's loader is."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import paceline
from paceline.train.seeding import Epoch, Use, sequence_of, torch_generator

SEEDS, EPOCHS, INDICES = st.integers(0, 2**63 - 1), st.integers(0, 10**6), st.integers(0, 2**32 - 1)
USES, STREAMS = st.sampled_from(Use), st.integers(0, 2**32 - 1)


def state() -> list[Any]:
    kept: Any = np.random.get_state(legacy=True)
    return [torch.get_rng_state().tolist(), kept[1].tolist(), kept[2], random.getstate()]


KEYS = st.tuples(SEEDS, EPOCHS, INDICES, USES, STREAMS)


@given(KEYS, KEYS, st.sets(st.integers(0, 4)))
def test_seed_epoch_index_use_and_stream_give_numbers_of_their_own(
    first: tuple[Any, ...], other: tuple[Any, ...], changed: set[int]
) -> None:
    second: Any = tuple(other[i] if i in changed else value for i, value in enumerate(first))
    a, b = (np.random.default_rng(sequence_of(*of)).random(4).tolist() for of in (first, second))
    assert (a == b) == (first == second)


@given(SEEDS, EPOCHS, INDICES)
def test_the_streams_of_a_sample_begin_anew_with_each_call(
    seed: int, epoch: int, index: int
) -> None:
    loaded = Epoch(seed, shared=False)
    loaded.number = epoch
    with loaded:
        first, second = (torch.rand(3, generator=paceline.generator(index)) for _ in range(2))
        of_numpy = [paceline.numpy_generator(index).random() for _ in range(2)]
        with paceline.seeded(index):
            of_globals = torch.rand(3)
        of_streams = [torch.rand(3, generator=paceline.generator(index, stream=1))]
        with paceline.seeded(index, stream=1):
            of_streams.append(torch.rand(3))
        of_numpy.append(paceline.numpy_generator(index, stream=1).random())
    oracle = torch.rand(3, generator=torch_generator(sequence_of(seed, epoch, index), "cpu"))
    assert torch.equal(first, second)
    assert torch.equal(first, oracle)
    assert of_numpy[0] == of_numpy[1] != of_numpy[2]
    # A transform's numbers, those of a generator and those of another stream are independent.
    apart = torch.stack([first, of_globals, *of_streams]).flatten().tolist()
    assert len(set(apart)) == len(apart)


def test_seeded_leaves_the_processs_own_random_numbers_as_they_are() -> None:
    before = state()
    with pytest.raises(KeyError), Epoch(1, shared=False), paceline.seeded(3):
        torch.rand(2), np.random.random(), random.random()
        raise KeyError
    assert state() == before


def test_outside_of_a_sessions_loader_the_seed_is_drawn() -> None:
    """As in a plain DataLoader: augmentation goes on as it does without Paceline."""
    torch.manual_seed(1)
    drawn = [float(torch.rand((), generator=paceline.generator(0))) for _ in range(2)]
    torch.manual_seed(1)
    again = [float(torch.rand((), generator=paceline.generator(0))) for _ in range(2)]
    assert drawn == again
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("index", "error"), [(-1, ValueError), (1.5, TypeError), ("3", TypeError), (None, TypeError)]
)
def test_what_is_no_index_is_refused(index: Any, error: type[Exception]) -> None:
    for call in (paceline.generator, paceline.numpy_generator):
        with pytest.raises(error, match="index is"):
            call(index)
        with pytest.raises(error, match="index is"), Epoch(1, shared=False):
            call(index)
        with pytest.raises(error, match="stream is"):
            call(0, stream=index)
        with pytest.raises(error, match="stream is"), Epoch(1, shared=False):
            call(0, stream=index)


def test_an_index_of_numpy_or_torch_is_one() -> None:
    with Epoch(1, shared=False):
        drawn = {
            paceline.numpy_generator(index).random() for index in (3, np.int64(3), torch.tensor(3))
        }
    assert len(drawn) == 1
