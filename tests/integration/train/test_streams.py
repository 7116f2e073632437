"""Ranks that train on streams: each sample once, the right gradients, and nobody hangs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import paceline
from paceline.core.streaming.reading import Claim
from paceline.data import Stream
from paceline.train.streams.processes import in_processes
from paceline.train.streams.reader import opened, signed
from support.node import wait_gone
from support.ranks import RankError, Ranks
from support.streams import (
    BATCH,
    BUFFER,
    SAMPLES,
    Numbers,
    Sharing,
    Trained,
    by_one_process,
    failing,
    failing_shard,
    numbers_of,
    other_streams,
    parts,
    read_by_processes,
    read_rows,
    resumed,
    shard,
    sharing_shard,
    size_of,
    size_of_row,
    train,
    uneven,
)

pytestmark = pytest.mark.ranks

ALL = list(range(SAMPLES))


def trained(ran: list[Trained]) -> list[int]:
    return sorted(chain(*(step for rank in ran for step in rank.steps)))


@pytest.mark.parametrize("longer", [60, 90, SAMPLES])
def test_uneven_parts_are_trained_once_with_the_gradients_of_one_process(
    ranks: Ranks, longer: int
) -> None:
    """The last case: rank 1 has no sample of its own, and runs fillers all the time."""
    ran = ranks.run(uneven, [range(longer), range(longer, SAMPLES)])
    assert trained(ran) == ALL
    steps = [list(chain(*parts_of)) for parts_of in zip(*(rank.steps for rank in ran), strict=True)]
    assert [len(step) for step in steps] == [BATCH] * (SAMPLES // BATCH)
    for step, weights in zip(
        zip(*(rank.steps for rank in ran), strict=True),
        zip(*(rank.weights for rank in ran), strict=True),
        strict=True,
    ):
        assert weights == pytest.approx([len(part) / BATCH for part in step])
    torch.testing.assert_close(ran[0].parameters, ran[1].parameters)
    torch.testing.assert_close(ran[0].parameters, by_one_process(steps))
    assert "a stream has no length" in ran[0].length


def test_a_loop_that_was_left_early_begins_anew_in_the_next_epoch(ranks: Ranks) -> None:
    ran = ranks.run(uneven, [range(70), range(70, SAMPLES)], 2, 3)
    second = [Trained(rank.steps[4:]) for rank in ran]
    assert trained(second) == ALL


def test_training_goes_on_after_an_epoch_and_not_within_one(ranks: Ranks) -> None:
    ran = ranks.run(uneven, [range(60), range(60, SAMPLES)])
    state = ran[0].state
    assert (state["epoch"], state["step"]) == (1, SAMPLES // BATCH)
    again = ranks.run(resumed, state)
    assert [rank.epochs for rank in again] == [[1], [1]]
    assert trained(again) == ALL


def test_a_source_that_fails_ends_training_on_every_rank(ranks: Ranks) -> None:
    said = ranks.run(failing)
    assert said == ["rank 1 cannot read the stream: OSError: the disk is gone"] * 2


def test_ranks_with_other_streams_are_told(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"buffer=33.* on rank 1 but .*buffer=32.* on rank 0"):
        ranks.run(other_streams)


def test_a_single_process_trains_on_a_stream_too() -> None:
    source = Numbers(range(SAMPLES))
    ran = train(Stream(source, size=size_of, split="none", buffer=64), epochs=2)
    assert trained([ran]) == sorted(ALL * 2)
    assert source.epochs == [0, 1]
    assert ran.epochs == [0, 1]


@pytest.mark.parametrize("shuffle", [False, True])
def test_an_order_is_kept_or_drawn_anew_in_each_epoch(shuffle: bool) -> None:
    ran = train(parts([range(SAMPLES)], shuffle=shuffle), epochs=2)
    orders = list(chain(*ran.steps))[:SAMPLES], list(chain(*ran.steps))[SAMPLES:]
    assert (orders[0] == ALL) == (orders[1] == ALL) == (not shuffle)
    assert (orders[0] == orders[1]) == (not shuffle)


def test_shards_are_opened_in_another_order_in_each_epoch() -> None:
    opened: list[int] = []

    def shard(number: int) -> Numbers:
        opened.append(number)
        return Numbers(range(number * 10, number * 10 + 10))

    ran = train(Stream.shards(range(12), shard, size=size_of, buffer=64), epochs=2)
    assert trained([ran]) == sorted(ALL * 2)
    first = opened[: len(opened) // 2]
    assert set(first) == set(range(12))
    assert first != sorted(first)


@pytest.mark.parametrize("kind", ["shards", "none"])
def test_processes_read_each_sample_once(ranks: Ranks, kind: str) -> None:
    ran = ranks.run(read_by_processes, kind, timeout_s=120)
    assert trained(ran) == sorted(ALL * 2)
    assert all(rank.steps for rank in ran)


@pytest.mark.parametrize("split", ["shards", "none", "ranks"])
def test_a_source_that_is_shared_among_processes_loses_no_sample(split: str) -> None:
    if split == "shards":
        stream = Stream.shards(range(SAMPLES // 10), sharing_shard, size=size_of, buffer=BUFFER)
    else:
        stream = Stream(Sharing(range(SAMPLES)), size=size_of, split=split, buffer=BUFFER)
    assert trained([train(stream, loading={"num_workers": 2})]) == ALL


@pytest.mark.parametrize("shards", [1, 4])
def test_processes_read_each_sample_of_hugging_face_once(shards: int) -> None:
    datasets = pytest.importorskip("datasets")
    each = SAMPLES // shards
    parts_of = [range(first, first + each) for first in range(0, SAMPLES, each)]
    made = datasets.IterableDataset.from_generator(numbers_of, gen_kwargs={"shards": parts_of})
    stream = Stream.of_hugging_face(made, size=size_of_row, buffer=BUFFER)
    read = list(chain(*read_rows(stream, processes=2)))
    assert sorted(read) == ALL


def test_a_process_that_fails_ends_training() -> None:
    stream = Stream.shards([0, 1], failing_shard, size=size_of, buffer=BUFFER)
    with pytest.raises(paceline.PacelineError, match=r"(?s)rank 0 cannot read .*the disk is gone"):
        train(stream, loading={"num_workers": 2})


class HuggingFace:
    """As much of a ``datasets.IterableDataset`` as an adapter needs."""

    def __init__(self, numbers: range, num_shards: int) -> None:
        self.numbers, self.num_shards = numbers, num_shards

    def shard(self, num_shards: int, index: int) -> Numbers:
        assert num_shards == self.num_shards
        return Numbers(self.numbers[index::num_shards])

    def __iter__(self) -> Iterator[int]:
        return iter(self.numbers)


@pytest.mark.parametrize("shards", [1, 6])
def test_a_data_set_of_hugging_face_is_read_by_shards(
    shards: int, caplog: pytest.LogCaptureFixture
) -> None:
    stream = Stream.of_hugging_face(HuggingFace(range(SAMPLES), shards), size=size_of, buffer=64)
    assert trained([train(stream)]) == ALL
    assert ("cannot be split" in caplog.text) == (shards == 1)
    with pytest.raises(TypeError, match="dataset is list: give a datasets"):
        Stream.of_hugging_face([1], size=size_of)


def test_hugging_faces_own_streams_have_what_the_adapter_needs() -> None:
    datasets = pytest.importorskip("datasets")
    made = datasets.IterableDataset.from_generator(
        lambda shards: (n for shard in shards for n in shard),
        gen_kwargs={"shards": [range(k, k + 30) for k in range(0, SAMPLES, 30)]},
    )
    stream = Stream.of_hugging_face(made, size=size_of, buffer=64)
    assert stream.kind.startswith("stream of 4 shards (names ")
    assert trained([train(stream)]) == ALL


def test_a_data_set_that_is_split_by_rank_is_refused() -> None:
    """Else each rank would claim shards of its own part, and the others' parts would be lost."""
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    made = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset(num_shards=4)
    part = distributed.split_dataset_by_node(made, rank=0, world_size=2)
    with pytest.raises(ValueError, match="dataset is already split by rank"):
        Stream.of_hugging_face(part, size=size_of_row)


def test_lists_of_shards_with_other_names_are_told_apart() -> None:
    def kind(shards: list[Any]) -> str:
        return Stream.shards(shards, Numbers, size=size_of).kind

    assert kind(["a.tar", "b.tar"]) == kind([Path("a.tar"), Path("b.tar")])
    assert kind(["a.tar", "b.tar"]) != kind(["b.tar", "a.tar"])
    assert kind([object(), object()]) == "stream of 2 shards"


class Epochs(Numbers):
    """A shard that says in which epoch it is read."""

    def __iter__(self) -> Iterator[int]:
        yield from (number + 1000 * self.epochs[-1] for number in self.numbers)


class InShards(HuggingFace):
    def shard(self, num_shards: int, index: int) -> Numbers:
        return Epochs(self.numbers[index::num_shards])


def test_shards_of_hugging_face_are_told_the_epoch() -> None:
    made = Stream.of_hugging_face(InShards(range(8), 2), size=size_of)
    pieces = iter([Claim(0, 0, 8), Claim(1, 0, 8)])
    reading = pickle.loads(pickle.dumps(made.reading))  # as a process that is spawned gets it
    read = reading.samples(3, lambda shards: next(pieces, None))
    assert sorted(read) == [3000 + number for number in range(8)]


def test_a_claim_that_fails_reaches_the_reader() -> None:
    def claim(shards: int) -> Claim | None:
        raise OSError("the store is gone")

    reading = Stream.shards([0, 1], shard, size=size_of).reading
    with pytest.raises(OSError, match="the store is gone"):
        list(in_processes(reading, 0, claim, {"num_workers": 1}))


@pytest.mark.parametrize("begins", ["at once", "late"])
def test_processes_that_wait_for_a_piece_end_with_their_rank(begins: str) -> None:
    command = [sys.executable, "-m", "support.waiting_script", begins]
    tests = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tests) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"2\n"
        processes = psutil.Process(rank.pid).children()
        rank.kill()
        wait_gone(processes)


def test_a_filler_that_no_rank_signed_is_not_read() -> None:
    key = bytes(32)
    word = signed(pickle.dumps(7), key)
    assert pickle.loads(opened(word, key)) == 7
    for forged in (pickle.dumps(7), word[:-1] + b"!", signed(pickle.dumps(7), b"?" * 32), b""):
        with pytest.raises(paceline.PacelineError, match="not written by a rank of this session"):
            opened(forged, key)


def test_what_does_not_go_with_a_stream_is_refused_by_name() -> None:
    stream = parts([range(SAMPLES)])
    refused: list[tuple[dict[str, Any], str]] = [
        ({"shapes": 4}, "shapes: not supported with a stream"),
        ({"micro_batches": True}, "micro_batches: not supported with a stream"),
        ({"uneven_steps": True}, "uneven_steps: not supported with a stream"),
        ({"sizes": [1.0]}, "sizes: not supported with a stream"),
        ({"global_batch": None, "token_budget": 9}, "Stream and token_budget cannot be combined"),
        ({"token_limits": 9}, "token_limits needs token_budget"),
        ({"global_batch": 9}, r"Stream\(buffer=32\): must be at least 4 times global_batch, 36"),
    ]
    for options, words in refused:
        with pytest.raises(ValueError, match=words):
            paceline.Session(stream, **({"global_batch": BATCH} | options))
    session = paceline.Session(stream, global_batch=BATCH)
    with pytest.raises(paceline.PacelineError, match="profile: not supported with a stream"):
        session.profile(lambda n: None)
    with pytest.raises(paceline.PacelineError, match="checkpoint: not supported with a stream"):
        session.checkpoint("nowhere", torch.nn.Linear(1, 1), None, every_steps=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a stream has no length"):
        _ = session.steps_per_epoch
    session.close()


def test_a_state_within_an_epoch_is_refused() -> None:
    session = paceline.Session(parts([range(SAMPLES)]), global_batch=BATCH)
    for _ in session.loader():
        with pytest.raises(paceline.PacelineError, match="in the middle of an epoch"):
            session.state_dict()
        break
    session.close()


def test_after_a_stop_the_epoch_begins_again() -> None:
    session = paceline.Session(parts([range(SAMPLES)]), global_batch=BATCH)
    for _ in session.loader():
        if session.step == 4:
            assert session._loop.wiring is not None
            session._loop.wiring.follower.stopped = True  # as an operator's stop does
            break
    state = session.state_dict()
    session.close()
    assert (state["epoch"], state["step"]) == (0, 5)
    again = train(parts([range(SAMPLES)]), state=state)
    assert again.epochs == [0]
    assert trained([again]) == ALL


def test_wrong_arguments_of_a_stream_are_told() -> None:
    with pytest.raises(ValueError, match="split='all': give 'ranks'"):
        Stream([1], size=size_of, split="all")
    with pytest.raises(TypeError, match="source is generator: give an iterable"):
        Stream((n for n in range(3)), size=size_of, split="none")
    with pytest.raises(TypeError, match="size=3: give a function"):
        Stream([1], size=3, split="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="buffer=0"):
        Stream([1], size=size_of, split="none", buffer=0)
    with pytest.raises(ValueError, match="shards: give a list"):
        Stream.shards("a.tar", Numbers, size=size_of)
    with pytest.raises(TypeError, match="shards is generator: give a list of shards"):
        Stream.shards((f"{n}.tar" for n in range(3)), Numbers, size=size_of)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (Numbers(range(0)), "the stream returned 0 samples in epoch 0"),
        (Numbers(range(100), fails_at=50), "rank 0 cannot read the stream: OSError"),
    ],
)
def test_nothing_to_train_or_a_failure_ends_training(source: Numbers, words: str) -> None:
    with pytest.raises(paceline.PacelineError, match=words):
        train(Stream(source, size=size_of, split="none", buffer=64))


def test_a_shard_that_opens_to_nothing_is_told() -> None:
    opens: Any = {"a.tar": None}.get
    with pytest.raises(paceline.PacelineError, match=r"open\('a.tar'\) returned None"):
        train(Stream.shards(["a.tar"], opens, size=size_of, buffer=64))


def test_a_size_that_fails_is_told_with_the_lines_of_the_script(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def size_of_flac(sample: Any) -> float:
        return len(sample["flac"])

    with pytest.raises(paceline.PacelineError, match=r"ValueError: size\(sample\): TypeError: "):
        train(Stream(Numbers(range(50)), size=size_of_flac, split="none", buffer=64))
    assert 'return len(sample["flac"])' in caplog.text


def test_a_size_that_is_none_is_told() -> None:
    with pytest.raises(paceline.PacelineError, match=r"ValueError: size\(sample\) is 0"):
        train(Stream(Numbers(range(50)), size=lambda sample: 0.0, split="none", buffer=64))
