"""Which backends there are, and what runs may ask of engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from importlib import metadata
from typing import Any, ClassVar

import msgspec
import pytest

from paceline_backend import backends
from paceline_backend.backends import registry
from paceline_backend.backends.slurm import Slurm
from paceline_backend.store.new_runs import NewRun

NEW = NewRun("train", "/shared/train.py", 2, "bsp", backend="slurm", nodes_min=2, nodes_max=4)


class Foreign(backends.Engine):
    """An engine of another package."""

    name: ClassVar[str] = "foreign"
    title: ClassVar[str] = "Foreign"
    options: ClassVar[type[msgspec.Struct]] = backends.EngineOptions

    def availability(self) -> backends.Availability:
        return backends.Availability(True, "1")

    def submit(self, order: backends.Order) -> str:
        return "1"

    def look(self, prefix: str) -> list[backends.Job]:
        return []

    def stop(self, refs: Any) -> None:
        pass


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[metadata.EntryPoint]]:
    """The entry points of the group, to which a test may add."""
    known = list(metadata.entry_points(group=registry.GROUP))
    monkeypatch.setattr(registry, "entry_points", lambda group: known)
    registry._backends.cache_clear()
    yield known
    registry._backends.cache_clear()


def entry(name: str, value: str) -> metadata.EntryPoint:
    return metadata.EntryPoint(name, value, registry.GROUP)


def test_the_backends() -> None:
    assert backends.names() == ["kubernetes", "local", "ray", "simulated", "slurm"]
    assert list(backends.engines()) == ["kubernetes", "ray", "slurm"]
    with pytest.raises(
        backends.UnknownBackendError, match="known: kubernetes, local, ray, simulated, slurm"
    ):
        backends.get("slrum")


def test_a_backend_of_another_package(entries: list[metadata.EntryPoint]) -> None:
    entries.append(entry("foreign", f"{__name__}:Foreign"))
    assert backends.engine("foreign") is not None
    assert "foreign" in backends.planned()


@pytest.mark.parametrize(
    "name, value",
    [("other", f"{__name__}:Foreign"), ("x", "no.such:X"), ("slurm", f"{__name__}:F")],
)
def test_what_is_no_backend_is_left_out(
    entries: list[metadata.EntryPoint], caplog: pytest.LogCaptureFixture, name: str, value: str
) -> None:
    entries.append(entry(name, value))
    assert backends.names() == ["kubernetes", "local", "ray", "simulated", "slurm"]
    assert "is ignored" in caplog.text


@pytest.mark.parametrize(
    "options, field, words",
    [
        ({"partition": 3}, "backend_options.partition", "str"),
        ({"patition": "gpu"}, "backend_options", "the options are: server, partition"),
        ({"partition": "a\n--uid=0"}, "backend_options.partition", "regex"),
        ({"cpus_per_node": 0}, "backend_options.cpus_per_node", ">= 1"),
    ],
)
def test_options_that_slurm_does_not_take(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(backends.NewRunError) as refused:
        Slurm().check(replace(NEW, backend_options=options), launch=True)
    assert refused.value.field == field
    assert words in refused.value.message


@pytest.mark.parametrize(
    "change, field",
    [
        ({"env": {"A": "1"}}, "env"),
        ({"node": "n1"}, "node"),
        ({"script": "train.py"}, "script"),
        ({"script": "train.py", "cwd": "here"}, "cwd"),
        ({"nodes_min": 5}, "nodes_min"),
        ({"scenario": {}}, "scenario"),
    ],
)
def test_runs_that_no_engine_starts(change: dict[str, Any], field: str) -> None:
    Slurm().check(NEW, launch=True)
    with pytest.raises(backends.NewRunError) as refused:
        Slurm().check(replace(NEW, **change), launch=True)
    assert refused.value.field == field


def test_an_engine_starts_its_runs_itself() -> None:
    with pytest.raises(backends.NewRunError, match="launch"):
        Slurm().check(NEW, launch=False)


def test_nobody_else_has_options() -> None:
    new = replace(NEW, backend="local", backend_options={"partition": "gpu"})
    with pytest.raises(backends.NewRunError, match="the options are: none"):
        backends.get("local").check(new, launch=True)


def test_nodes_that_a_run_has_are_launched_anew() -> None:
    nodes = [{"id": f"n{i}", "alive": i != 2, "signed": True} for i in range(4)]
    new = replace(NEW, nodes=["n0", "n1", "n2"])
    assert Slurm().place(new, nodes) == ["n0", "n1"]
    assert Slurm().place(NEW, nodes) == []
    with pytest.raises(backends.NoNodeError, match="3 nodes are needed, 2 are available"):
        Slurm().place(replace(new, nodes_min=3), nodes)
