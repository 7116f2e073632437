"""BatchNorm over uneven and empty local batches: as in one process, or as docs say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support import norms
from support.ranks import Ranks

pytestmark = pytest.mark.ranks
BOUND = 1e-5  # docs/invariants.md, invariant 2
AUTOCAST = 0.1  # bfloat16 has 8 bits; batches are of a few samples


@pytest.fixture(scope="module", params=[3, pytest.param(2, marks=pytest.mark.long)])
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    pool = Ranks(request.param)
    yield pool
    pool.stop()


def counts(world: int, most: int = 5) -> st.SearchStrategy[list[int]]:
    """Samples per rank, often none or one; at least two in all."""
    return st.lists(st.integers(0, most), min_size=world, max_size=world).filter(
        lambda split: sum(split) > 1
    )


SETTINGS = st.builds(
    norms.Setting,
    dimensions=st.integers(0, 3),
    momentum=st.sampled_from([0.1, None, 0.7]),
    affine=st.booleans(),
    tracked=st.booleans(),
    offset=st.sampled_from([0.0, 3.0]),
    existing=st.booleans(),
    double=st.booleans(),
)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), setting=SETTINGS, mean=st.sampled_from(["samples", "size"]))
def test_synchronised_is_one_process(
    ranks: Ranks, data: st.DataObject, setting: norms.Setting, mean: str
) -> None:
    """Outputs, gradients of inputs and parameters, running statistics, and evaluation."""
    # Two values that are normalised become -1 and 1 whatever they are, so that gradients are all
    # rounding in float32.
    least = 2 if setting.double else 4
    splits = counts(ranks.world).filter(lambda split: sum(split) >= least)
    steps = data.draw(st.lists(splits, min_size=1, max_size=3))
    for errors in ranks.run(norms.compare, setting, steps, mean, data.draw(st.integers(0, 999))):
        assert max(errors.values()) <= BOUND, errors


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), dimensions=st.integers(0, 3), existing=st.booleans())
def test_under_autocast_it_is_one_process_to_its_precision(
    ranks: Ranks, data: st.DataObject, dimensions: int, existing: bool
) -> None:
    setting = norms.Setting(dimensions=dimensions, existing=existing, autocast=True)
    split = data.draw(counts(ranks.world).filter(lambda split: sum(split) >= 4))
    for errors in ranks.run(norms.compare, setting, [split], "samples", 3):
        assert max(errors.values()) <= AUTOCAST, errors


@pytest.mark.parametrize("existing", [False, True])
def test_a_global_batch_of_one_value_is_refused_on_all_ranks(ranks: Ranks, existing: bool) -> None:
    """As torch refuses it in one process."""
    for said in ranks.run(norms.of_one_value, existing):
        assert "Expected more than 1 value per channel when training, got a global batch" in said


def test_a_filler_and_a_single_value_leave_local_statistics_alone(ranks: Ranks) -> None:
    split = [0, 4, 1][: ranks.world]
    empty, full, *single = ranks.run(norms.pretended, split)
    assert full == {"moved": True, "counted": 1, "as evaluated": False, "trains": True}
    for odd in [empty, *single]:
        assert odd == {"moved": False, "counted": 0, "as evaluated": True, "trains": True}


def test_copies_are_of_the_class_that_the_script_chose(ranks: Ranks) -> None:
    for names in ranks.run(norms.copies):
        assert names == ["SynchronisedBatchNorm2d", "BatchNorm2d", "BatchNorm2d"]


def test_waiting_in_a_layer_is_no_computing(ranks: Ranks) -> None:
    """Else all ranks would seem as slow as the slowest one."""
    (late, late_sync), *others = ranks.run(norms.waits, 0.5)
    assert late >= 0.5 > late_sync
    for compute_s, sync_s in others:
        assert sync_s > compute_s
        assert compute_s < 0.5


# Whole loops


def test_synchronised_training_is_that_of_one_process(ranks: Ranks) -> None:
    """Twelve samples by fives: uneven batches, and at the end two samples, for three ranks, too."""
    alone = norms.train("sync", 12, 5)
    for seen in ranks.run(norms.train, "sync", 12, 5):
        torch.testing.assert_close(seen.model, alone.model)


@pytest.mark.parametrize("leave_at", [None, 1])
def test_local_statistics_agree_after_an_epoch(ranks: Ranks, leave_at: int | None) -> None:
    """By the samples that each rank has trained; also where all ranks break."""
    every = ranks.run(norms.train, "local", 18, 5, leave_at)
    apart = torch.stack([seen.after[-1] for seen in every])
    weights = torch.tensor([float(sum(seen.samples)) for seen in every])
    mean = (apart * weights[:, None]).sum(0) / weights.sum()
    assert not torch.equal(apart[0], apart[1])
    assert len(set(weights.tolist())) > 1
    for seen in every:
        torch.testing.assert_close(seen.model["1.running_mean"], mean)
        assert all(torch.equal(seen.model[n], value) for n, value in every[0].model.items())


def test_a_checkpoint_has_statistics_that_agree(ranks: Ranks, tmp_path: Path) -> None:
    every = ranks.run(norms.train, "local", 20, 5, None, str(tmp_path))
    for seen in every:
        assert all(torch.equal(seen.saved[n], value) for n, value in every[0].model.items())


def test_profiling_leaves_the_statistics_alone(ranks: Ranks) -> None:
    assert all(ranks.run(norms.profiled))


def test_synchronised_layers_and_micro_batches_do_not_go_together() -> None:
    said = norms.refused_microbatches()
    assert "batchnorm='sync'" in said
    assert "give batchnorm='local'" in said
