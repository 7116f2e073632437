"""How gradients meet, as it travels, and what is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from paceline.wire import synchronisation
from paceline.wire.synchronisation import (
    ALLREDUCE,
    SYNC_NAMES,
    Hierarchical,
    HierarchicalRules,
    Partial,
    PartialRules,
    Synchronisation,
    convert,
)

RNA = {"probes": 2, "staleness": 4, "mean": True}
KINDS: list[tuple[str, dict[str, Any], str]] = [
    ("allreduce", {}, "cf06661647f431ed"),
    ("averaging", {"every": 8}, "4490a1b4e1ec06b0"),
    ("averaging", {"every": None}, "60ee0a97fac50e23"),
    ("pairwise", {}, "acbf056a498eefc0"),
    ("partial", RNA, "259129e04dc61189"),
    (
        "partial",
        {"probes": None, "staleness": 4, "mean": False, "waits": True, "paced": True},
        "e472354e2b581099",
    ),
    ("partial", {"parts": 2, "staleness": 4, "mean": False}, "89827af31099a4eb"),
    ("partial", {"quorum": 1, "staleness": None, "lead": 0, "mean": False}, "0954a97b5f99e1cf"),
    ("partial", {"spare": 1, "staleness": 0, "waits": True, "mean": False}, "ff3ce2672f5090b1"),
    ("hierarchical", RNA | {"groups": [[0, 2], [1]], "every": 4}, "3a8994c8382e6eb4"),
]


@pytest.mark.parametrize(("name", "parameters", "digest"), KINDS)
def test_names_parameters_and_digests_stay(
    name: str, parameters: dict[str, Any], digest: str
) -> None:
    plain = {"name": name, "parameters": parameters}
    what = synchronisation.decode(msgspec.msgpack.encode(plain))
    assert msgspec.to_builtins(what) == plain
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(what)) == plain
    assert (what.name, what.digest, what.defect(3)) == (name, digest, None)


def test_all_types_are_named() -> None:
    names = {kind.__struct_config__.tag for kind in Synchronisation.__args__}
    assert names == set(SYNC_NAMES) == {name for name, _, _ in KINDS}


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


FIT: dict[str, dict[str, Any]] = {
    "allreduce": {},
    "averaging": {"every": 3},
    "hierarchical": RNA | {"groups": [[1], [0]], "every": 4},
    "pairwise": {},
    "partial": {"quorum": 1, "staleness": None, "mean": False},
}


@pytest.mark.parametrize("name", SYNC_NAMES)
@pytest.mark.parametrize(
    "changes",
    [
        {"groups": 5},
        {"groups": [5, 6]},
        {"groups": [["0"], ["1"]]},
        {"groups": [[0, 1], []]},
        {"every": 0},
        {"every": 2.5},
        {"every": nested(900)},
        {"every": {(1, 2): msgspec.msgpack.Ext(5, b"")}},
        {"probes": "2"},
        {"probes": 0},
        {"probes": 2, "parts": 2},
        {"quorum": 0},
        {"parts": 0.5},
        {"spare": -1},
        {"staleness": "4"},
        {"lead": float("nan")},
        {"lead": 2**40},
        {"mean": None},
        {"other": 1},
        {1: 2},
    ],
    ids=lambda changes: f"{changes}"[:30],
)
def test_parameters_that_a_synchroniser_does_not_take_are_refused(
    name: str, changes: dict[Any, Any]
) -> None:
    text = msgspec.msgpack.encode({"name": name, "parameters": FIT[name] | changes})
    with pytest.raises(ValueError, match="parameters"):
        synchronisation.decode(text)
    with pytest.raises(ValueError, match=f"synchroniser '{name}': parameters"):
        convert(name, FIT[name] | changes)


@pytest.mark.parametrize("missing", ["staleness", "mean", "quorum"])
def test_parameters_that_a_synchroniser_needs_are_named(missing: str) -> None:
    given = {key: value for key, value in FIT["partial"].items() if key != missing}
    with pytest.raises(ValueError, match=missing):
        convert("partial", given)


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        ({"probes": 0}, "parameters.probes: expected `int` >= 1"),
        ({"probes": 2**70}, "can't serialize ints"),
        ({"probes": object()}, "object"),
        ({"probes": nested(2000)}, "parameters.probes: expected|recursion"),
        ({"mean": 1}, "parameters.mean: expected `bool`, got `int`"),
    ],
)
def test_what_python_code_made_is_checked_too(rules: dict[str, Any], says: str) -> None:
    made = Partial(PartialRules(**(RNA | rules)))
    with pytest.raises(ValueError, match=says):
        raise ValueError(made.defect())


@pytest.mark.parametrize("groups", [[[0]], [[0], [0, 1]], [[0, 1, 2]], [[0], [2]]])
def test_groups_must_be_those_of_the_ranks(groups: list[list[int]]) -> None:
    made = Hierarchical(HierarchicalRules(**RNA, groups=groups, every=None))
    assert made.defect() is None
    assert f"parameters.groups: {groups} do not match 2 ranks" in str(made.defect(2))


def test_an_unknown_name_is_refused_with_those_that_ranks_know() -> None:
    with pytest.raises(
        ValueError, match="'gossip' is unknown: choose from allreduce, averaging, hier"
    ):
        convert("gossip")
    with pytest.raises(ValueError, match="name: invalid value 'gossip'"):
        synchronisation.decode(msgspec.msgpack.encode({"name": "gossip", "parameters": {}}))
    assert convert("allreduce") == ALLREDUCE
