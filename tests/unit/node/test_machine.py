"""What a node says of its machine: its cores, those that its processes may use, and its type."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest

from paceline.node import machine


@pytest.mark.parametrize(
    ("limits", "cores"),
    [
        ({}, 64),  # as outside of containers
        ({"kube": "max 100000"}, 64),
        ({"kube/pod": "200000 100000"}, 2),
        ({"kube/pod": "250000 100000"}, 3),  # a part of a core is a core
        ({"kube": "400000 100000", "kube/pod": "max 100000"}, 4),  # of the group above
        ({"kube/pod": "50000 100000"}, 1),
        ({"kube/pod": "9000000 100000"}, 64),
        ({"kube/pod": "what?"}, 64),
    ],
)
def test_a_containers_quota_counts(
    limits: dict[str, str], cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    own = tmp_path / "own"
    own.write_text("4:memory:/other\n0::/kube/pod\n")
    for group, limit in limits.items():
        (tmp_path / group).mkdir(parents=True, exist_ok=True)
        (tmp_path / group / "cpu.max").write_text(f"{limit}\n")
    assert machine.cores(own, tmp_path) == cores


def test_without_control_groups_the_affinity_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 4})
    assert machine.cores(tmp_path / "none", tmp_path) == 2
    (tmp_path / "own").write_text("1:cpu:/old\n")  # version 1 only
    assert machine.cores(tmp_path / "own", tmp_path) == 2


@pytest.mark.parametrize(
    ("described", "name"),
    [
        ("processor\t: 0\nmodel name\t: Some Xeon: 2.5 GHz\n", "Some Xeon: 2.5 GHz"),
        ("processor\t: 0\nCPU part\t: 0xd0c\n", None),  # as on ARM
        (None, None),
    ],
)
def test_a_cpu_has_its_models_name_or_its_architectures(
    described: str | None, name: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "cpuinfo"
    if described is not None:
        file.write_text(described)
    assert machine.processor(file) == (name or platform.machine())
