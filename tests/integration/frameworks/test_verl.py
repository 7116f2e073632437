"""verl's balancing module with `paceline.verl.install`, on the shapes of verl's own tests.

verl is installed without its dependencies (scripts/setup.sh), so what its module imports and these
tests do not need is replaced.
"""

from __future__ import annotations

import importlib
import itertools
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

import paceline
from paceline.core.errors import PacelineError
from paceline.verl import get_seqlen_balanced_partitions, install

pytestmark = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")

Divide = Callable[[Any, int, bool], list[list[int]]]


def select(batch: dict[str, torch.Tensor], indices: list[int]) -> dict[str, torch.Tensor]:
    """What verl's `index_select_tensor_dict` does, for a dictionary."""
    return {name: values[indices] for name, values in batch.items()}


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """verl's balancing module, and after the test none of verl's modules."""
    spec = find_spec("verl")
    assert spec is not None
    assert spec.submodule_search_locations
    root = spec.submodule_search_locations[0]
    utils = types.SimpleNamespace(index_select_tensor_dict=select)
    stubs: dict[str, dict[str, Any]] = {
        "verl": {"__path__": [root]},
        "verl.utils": {"__path__": [f"{root}/utils"], "tensordict_utils": utils},
        "verl.protocol": {"DataProto": None},
        "verl.utils.device": {"get_device_name": lambda: "cpu"},
    }
    for name, values in stubs.items():
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
        vars(sys.modules[name]).update(values)
    yield importlib.import_module("verl.utils.seqlen_balancing")
    del sys.modules["verl.utils.seqlen_balancing"]


def largest(parts: list[list[int]], costs: list[int]) -> int:
    return max(sum(costs[item] for item in part) for part in parts)


def masked(rng: np.random.Generator, rows: int) -> dict[str, torch.Tensor]:
    """A batch as in verl's tests: up to 10 tokens of padding, then 50 to 90 of 100 are valid."""
    mask = torch.zeros(rows, 100, dtype=torch.int64)
    for row in mask:
        left = int(rng.integers(0, 11))
        row[left : left + int(rng.integers(50, 91))] = 1
    return {"input_ids": torch.randint(0, 10, (rows, 100)), "attention_mask": mask}


def costs_of(rng: np.random.Generator, verl: Any, case: int, items: int) -> list[int]:
    lengths = [
        rng.integers(1, 100, items),
        rng.lognormal(6, 1, items).astype(int) + 1,
        rng.integers(1, 5, items),
        rng.integers(50, 91, items),
    ][case % 4]
    made: list[int] = (verl.calculate_workload(lengths) if case % 2 else lengths).tolist()
    return made


@pytest.mark.parametrize("equal_size", [True, False])
def test_installed_it_is_never_worse_than_verls(verl: Any, equal_size: bool) -> None:
    theirs: Divide = verl.get_seqlen_balanced_partitions
    install()
    ours: Divide = verl.get_seqlen_balanced_partitions
    rng, better = np.random.default_rng(7), 0
    for case in range(100):
        ranks = int(rng.integers(2, 9))
        costs = costs_of(rng, verl, case, ranks * int(rng.integers(1, 10)))
        parts, own = ours(costs, ranks, equal_size), theirs(costs, ranks, equal_size)
        assert sorted(itertools.chain(*parts)) == list(range(len(costs)))
        assert all(part and part == sorted(part) for part in parts)
        assert {len(part) for part in parts} == {len(costs) // ranks} or not equal_size
        assert largest(parts, costs) <= largest(own, costs)
        assert parts == ours(torch.tensor(costs), ranks, equal_size)
        better += largest(parts, costs) < largest(own, costs)
    assert better > 10


@pytest.mark.parametrize(("rows", "least"), [(20, None), (25, None), (20, 4), (20, 11)])
def test_micro_batches_of_verls_tests(verl: Any, rows: int, least: int | None) -> None:
    batch = masked(np.random.default_rng(rows), rows)
    _, own = verl.rearrange_micro_batches(batch, max_token_len=300, min_num_micro_batch=least)
    install(speeds=[1.0, 0.1])  # of ranks, so they do not count here
    micro, indices = verl.rearrange_micro_batches(
        batch, max_token_len=300, min_num_micro_batch=least
    )
    order = torch.tensor(verl.get_reverse_idx([item for part in indices for item in part]))
    for name, values in batch.items():
        assert torch.cat([each[name] for each in micro])[order].equal(values)
    assert all(int(each["attention_mask"].sum()) <= 300 for each in micro)
    assert len(micro) <= len(own)


@pytest.mark.parametrize(
    ("lengths", "groups", "ranks"),
    [
        ([100] * 4 + [200] * 4 + [150] * 4 + [50] * 4, [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4, 2),
        ([100, 200, 150, 50, 300, 250], [0, 1, 2, 3, 4, 5], 2),
        (
            [100, 100, 200, 200, 150, 150, 50, 50, 300, 300, 250, 250, 180, 180, 120, 120],
            [number // 2 for number in range(16)],
            4,
        ),
    ],
)
def test_groups_of_verls_tests_stay_together(
    verl: Any, lengths: list[int], groups: list[int], ranks: int
) -> None:
    own = verl.get_group_balanced_partitions(lengths, groups, k_partitions=ranks)
    install()
    parts = verl.get_group_balanced_partitions(lengths, groups, k_partitions=ranks)
    assert sorted(itertools.chain(*parts)) == list(range(len(lengths)))
    where = [{groups[item] for item in part} for part in parts]
    assert sum(map(len, where)) == len(set(groups))
    work = [int(verl.calculate_workload(length)) for length in lengths]
    assert largest(parts, work) <= largest(own, work)


def test_a_slow_rank_gets_equally_many_but_shorter_sequences(verl: Any) -> None:
    lengths = torch.tensor(np.random.default_rng(3).integers(10, 1000, 64))
    work = verl.calculate_workload(lengths)
    speeds = paceline.Speeds(4)
    install(speeds=speeds)
    even = verl.get_seqlen_balanced_partitions(work, k_partitions=4, equal_size=True)
    for _ in range(4):  # the last rank takes twice as long
        loads = [float(work[part].sum()) for part in even]
        speeds.add(loads, [load * (1 + (rank == 3)) for rank, load in enumerate(loads)], [16] * 4)
    parts = verl.get_seqlen_balanced_partitions(work, k_partitions=4, equal_size=True)
    loads = [int(work[part].sum()) for part in parts]
    assert [len(part) for part in parts] == [16] * 4
    assert loads[3] < 0.6 * min(loads[:3])


def test_modules_that_have_imported_it_get_it_too(
    verl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = types.ModuleType("verl.trainer.ppo.ray_trainer")
    vars(trainer)["get_seqlen_balanced_partitions"] = verl.get_seqlen_balanced_partitions
    monkeypatch.setitem(sys.modules, trainer.__name__, trainer)
    install()
    replaced = vars(trainer)["get_seqlen_balanced_partitions"]
    assert replaced is verl.get_seqlen_balanced_partitions
    assert replaced.__module__ == "paceline.verl"
    with pytest.raises(PacelineError, match="call it once"):
        install()


def test_no_partition_is_empty() -> None:
    parts = get_seqlen_balanced_partitions([10, 1, 1], 3, False)
    assert sorted(parts) == [[0], [1], [2]]
    parts = get_seqlen_balanced_partitions([5, 5, 0, 0], 4, False, speeds=[1, 1e-6, 1e-6, 1])
    assert sorted(map(len, parts)) == [1, 1, 1, 1]


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match="k_partitions=3: there are 2 sequences"):
        get_seqlen_balanced_partitions([1, 2], 3, False)
    with pytest.raises(ValueError, match="k_partitions=2 does not divide 3"):
        get_seqlen_balanced_partitions([1, 2, 3], 2, True)
    with pytest.raises(ValueError, match="speeds"):
        get_seqlen_balanced_partitions([1, 2], 2, True, speeds=[1.0])


def test_it_imports_neither_torch_nor_verl() -> None:
    program = (
        "import sys; from paceline.verl import get_seqlen_balanced_partitions as divide;"
        "divide([3, 1, 2], 2, False); print(sorted({'torch', 'verl'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
