"""Which devices ranks say they have, and when they make a trial of a second."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
import torch

from paceline.node import machine
from support import introductions
from support.ranks import Ranks

T4 = {"kind": "cuda", "name": "Tesla T4"}
L4 = {"kind": "cuda", "name": "NVIDIA L4"}
CPU = {"kind": "cpu", "name": "Xeon", "cores": 4, "memory_bytes": 1 << 33}
ODD = {"kind": "cuda", "name": "NVIDIA X9"}


def environment(devices: list[dict[str, Any]], run: str = "r") -> dict[str, str]:
    emulate = {"a_s": [0.02, 0.08], "b_s": [0.1, 0.1], "devices": devices}
    return {"PACELINE_EMULATE": json.dumps(emulate), "PACELINE_RUN": run}


@pytest.mark.ranks
def test_ranks_say_what_they_have(ranks: Ranks) -> None:
    (devices, trials), (elsewhere, _) = ranks.run(
        introductions.introduced, env={"PACELINE_RUN": "r"}
    )
    assert (len(devices), elsewhere, trials) == (2, devices, 0)
    for device in devices:
        assert (device.kind, device.name) == ("cpu", machine.processor())
        assert device.cores == machine.cores()
        assert device.memory_bytes == psutil.virtual_memory().total
        assert device.threads >= 1
        assert (device.flops, device.emulated) == (None, False)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("devices", "trials"),
    [
        ([T4, T4], 0),
        ([T4, L4], 0),
        ([ODD, ODD], 0),
        ([CPU, CPU], 0),
        ([T4, ODD], 1),
        ([T4, CPU], 1),
    ],
)
def test_a_trial_is_made_only_where_nothing_else_tells(
    ranks: Ranks, devices: list[dict[str, Any]], trials: int
) -> None:
    (known, made), (_, also) = ranks.run(introductions.introduced, env=environment(devices))
    assert (made, also) == (trials, trials)
    assert [(device.kind, device.name, device.emulated) for device in known] == [
        (device["kind"], device["name"], True) for device in devices
    ]
    if trials:
        fast, slow = (device.flops or 0.0 for device in known)
        assert fast / slow > 2, "speeds are emulated as 4 : 1, without what each step takes"
    else:
        assert [device.flops for device in known] == [None, None]


@pytest.mark.ranks
def test_no_trial_where_no_control_plane_plans(ranks: Ranks) -> None:
    (devices, trials), _ = ranks.run(introductions.introduced, env=environment([T4, CPU], run=""))
    assert (trials, [device.flops for device in devices]) == (0, [None, None])


def test_one_rank_alone_makes_no_trial() -> None:
    pool = Ranks(1)
    try:
        [(devices, trials)] = pool.run(introductions.introduced, env={"PACELINE_RUN": "r"})
    finally:
        pool.stop()
    assert ([device.kind for device in devices], trials) == (["cpu"], 0)


def test_a_trial_that_fails_tells_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from paceline.train import device

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(device, "_multiply", full)
    assert device.flops(torch.device("cpu"), lambda began: None) is None
    assert "the FLOP/s of cpu could not be measured: out of memory" in caplog.text


def test_a_trial_counts_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still but for what the emulated device takes: 0.1 s a product."""
    from paceline.train import device

    now = [0.0]
    monkeypatch.setattr(device.time, "perf_counter", lambda: now[0])

    def hold(began: float) -> None:
        now[0] = began + 0.1

    assert device.flops(torch.device("cpu"), hold) == pytest.approx(2 * 512**3 / 0.1)
    assert now[0] == pytest.approx(device.TRIAL_S, abs=0.11)
