"""Ranks whose data lives on nodes: directories of one machine, and a source over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from support.data_on_nodes import (
    ALL,
    SAMPLES,
    SIZE,
    content,
    other_data,
    plain_on_rank_1,
    read_beside,
    settled,
    train,
)
from support.http_files import FileServer, served
from support.ranks import RankError, Ranks

pytestmark = pytest.mark.ranks
WORLD = 3


@pytest.fixture
def server() -> Iterator[FileServer]:
    with served(b"".join(map(content, range(SAMPLES)))) as made:
        yield made


def held(folder: Path) -> list[int]:
    return sorted(int(path.name) for path in folder.glob("[0-9]*/[0-9]*"))


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}])
def test_ranks_share_a_directory_and_read_each_sample_once(
    ranks: Ranks, server: FileServer, tmp_path: Path, options: dict[str, Any]
) -> None:
    """Two nodes: ranks 0 and 1 share a directory, and all of the data fits onto each node."""
    directories = [str(tmp_path / name) for name in ("a", "a", "b")]
    ran = ranks.run(train, server.url, directories, SAMPLES * SIZE, 3, options, timeout_s=240)
    for epoch in range(3):
        assert sorted(chain(*(used[epoch] for used, _ in ran))) == ALL
    # Each node reads a sample once at most, but for what two ranks or the prefetcher read at once.
    assert len(server.reads) == SAMPLES
    for node, of_ranks in (("a", (0, 1)), ("b", (2,))):
        trained = {s for rank in of_ranks for used in ran[rank][0] for s in used}
        assert trained <= set(held(tmp_path / node))
    sent = [each for _, each in ran]
    assert [[row["epoch"] for row in rows] for rows in sent] == [[0, 1, 2]] * 3
    assert sent[0][0]["node"] == sent[1][0]["node"] != sent[2][0]["node"]
    assert sum(row["read"] for rows in sent for row in rows) <= server.reads.total()
    assert sent[1][2]["held_bytes"] == 0 < sent[0][2]["held_bytes"] <= SAMPLES * SIZE


def test_the_next_training_begins_with_what_is_there(
    ranks: Ranks, server: FileServer, tmp_path: Path
) -> None:
    directories = [str(tmp_path / "a")] * 3
    ranks.run(train, server.url, directories, SAMPLES * SIZE, 1, {}, timeout_s=240)
    assert held(tmp_path / "a") == ALL
    server.reads.clear()
    ran = ranks.run(train, server.url, directories, SAMPLES * SIZE, 1, {}, timeout_s=240)
    assert sorted(chain(*(used[0] for used, _ in ran))) == ALL
    assert not server.reads
    assert [row["read"] for _, rows in ran for row in rows] == [0, 0, 0]


def test_where_there_is_room_for_little_the_rest_is_read_each_time(
    ranks: Ranks, server: FileServer, tmp_path: Path
) -> None:
    directories = [str(tmp_path / name) for name in "abc"]
    ran = ranks.run(train, server.url, directories, 5 * SIZE, 2, {}, timeout_s=240)
    for epoch in range(2):
        assert sorted(chain(*(used[epoch] for used, _ in ran))) == ALL
    assert all(0 < len(held(tmp_path / name)) <= 5 for name in "abc")
    assert all(row["held_bytes"] <= 5 * SIZE for _, rows in ran for row in rows)
    assert all(row["read"] and row["waits"] <= 6 for _, rows in ran for row in rows)


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_reads_beside_the_loop_are_no_misses_of_steps(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    read, trained = read_beside(str(tmp_path / "a"), options)
    assert trained - 1 <= read <= trained == 8, "one sample fits into the directory"


def test_all_ranks_or_none_have_data_on_nodes(ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="dataset is 'plain' on rank 1 but 'Sharded' on rank 0"):
        ranks.run(plain_on_rank_1, str(tmp_path / "a"))


def test_a_directory_with_other_data_is_told_on_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    assert ranks.run(other_data, str(tmp_path / "a"), 4) == ["", "", ""]
    sent = ranks.run(other_data, str(tmp_path / "a"), 5)
    assert all("it has samples of other data: empty it" in words for words in sent), sent


def test_ranks_with_other_data_or_limits_are_told_what_to_do(ranks: Ranks, tmp_path: Path) -> None:
    apart = [str(tmp_path / name) for name in "aab"]
    alike, other = [0, 1, 2, 3], [0, 2, 4, 6]
    assert ranks.run(settled, apart, [alike] * 3, [9, 9, 8]) == [""] * 3
    said = ranks.run(settled, apart, [alike] * 3, [9, 8, 9])
    assert all("limit_bytes=8 on rank 1 but 9 on rank 0" in words for words in said), said
    assert all("give them the same limit" in words for words in said), said
    said = ranks.run(settled, apart, [alike, other, alike], [9] * 3)
    assert all("samples on rank 1 differ from those on rank 0: give" in words for words in said), (
        said
    )
