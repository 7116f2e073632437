"""Replica groups of a real torchft over gloo: they are killed and replaced while they train."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.frameworks import environment
from support.torchft import EPOCHS, SAMPLES, SIZES, STEPS, global_batch, trained_alone
from support.waiting import TRAINING_S, until

coordination = pytest.importorskip("torchft.coordination", reason="torchft is not installed")

pytestmark = [pytest.mark.long, pytest.mark.ranks, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).with_name("torchft_script.py")
SLOW_S = {"a": 9e-4, "b": 3e-4}  # for each unit of size
# From which step on, and at which place of a step, a group is killed: before its gradients count,
# so that the step is done again; after that; and after torchft has committed the step.
KILLS = [(3, "forward"), (12, "backward"), (21, "commit")]
# The others wait before these steps for the replacement.
GATES = [8, 17, 26]


class Groups:
    """Processes of replica groups and their lighthouse."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lighthouse = coordination.LighthouseServer(
            bind="[::]:0", min_replicas=2, join_timeout_ms=30_000, heartbeat_timeout_ms=3_000
        )

    def start(self, name: str, **given: Any) -> subprocess.Popen[bytes]:
        arguments = [str(self.folder), name, self._lighthouse.address(), json.dumps(given)]
        with (self.folder / f"{name}.{len(self._processes)}.err").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env={**os.environ, **environment()},
                stderr=errors,
            )
        self._processes.append(process)
        return process

    def said(self, process: subprocess.Popen[bytes]) -> list[dict[str, Any]]:
        lines = "".join(each.read_text() for each in self.folder.glob(f"*.{process.pid}.jsonl"))
        return [json.loads(line) for line in lines.splitlines(keepends=True) if line[-1:] == "\n"]

    def wait_for(self, process: subprocess.Popen[bytes], what: str, times: int = 1) -> None:
        def has_said() -> bool:
            assert process.poll() in (None, 0), self.errors()
            return sum(each["what"] == what for each in self.said(process)) >= times

        until(has_said, f"a group to say that it {what}", TRAINING_S)

    def all_said(self) -> list[list[dict[str, Any]]]:
        return [self.said(process) for process in self._processes]

    def errors(self) -> str:
        return "\n".join(each.read_text()[-3000:] for each in self.folder.glob("*.err"))

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()
        self._lighthouse.shutdown()


@pytest.fixture
def groups(tmp_path: Path) -> Iterator[Groups]:
    made = Groups(tmp_path)
    yield made
    made.close()


def committed(said: list[list[dict[str, Any]]]) -> dict[int, list[dict[str, Any]]]:
    """The parts of each step that was committed, of all workers that took part."""
    quorums = {
        each["step"]: each["quorum"] for log in said for each in log if each["what"] == "committed"
    }
    parts: dict[int, list[dict[str, Any]]] = {step: [] for step in quorums}
    for log in said:
        given = [each for each in log if each["what"] == "given"]
        newest = {
            each["step"]: each for each in given if each["quorum"] == quorums.get(each["step"])
        }
        for step, each in newest.items():
            parts[step].append(each)
    return parts


def check_batches(parts: dict[int, list[dict[str, Any]]]) -> None:
    assert sorted(parts) == list(range(STEPS))
    used: Counter[int] = Counter()
    for step, of_step in parts.items():
        trained = [index for part in of_step for index in part["indices"]]
        assert sorted(trained) == sorted(global_batch(step)), step
        assert len({part["participants"] for part in of_step}) == 1
        assert sum(part["weight"] for part in of_step) == pytest.approx(len(of_step))
        used.update(trained)
    assert used == dict.fromkeys(range(SAMPLES), EPOCHS)


def test_a_group_is_killed_and_replaced_three_times(groups: Groups) -> None:
    lasting = [groups.start(name, gates=GATES, slow_s=slow) for name, slow in SLOW_S.items()]
    newest = groups.start("c", hold=KILLS[0], slow_s=SLOW_S["b"])
    for number, gate in enumerate(GATES, 1):
        groups.wait_for(newest, "holds")
        newest.send_signal(signal.SIGKILL)
        newest.wait()
        for process in lasting:
            groups.wait_for(process, "waits", number)
        hold = KILLS[number] if number < len(KILLS) else None
        newest = groups.start("c", hold=hold, slow_s=SLOW_S["b"])
        groups.wait_for(newest, "asks")
        (groups.folder / f"gate-{gate}").touch()
    for process in [*lasting, newest]:
        groups.wait_for(process, "ended")

    said = groups.all_said()
    parts = committed(said)
    check_batches(parts)
    groups_in = {step: of_step[0]["participants"] for step, of_step in parts.items()}
    held = [each["step"] for log in said for each in log if each["what"] == "holds"]
    assert len(held) == len(KILLS)
    assert [groups_in[step] for step in held] == [2, 3, 3]  # the first one's step was done again
    assert [groups_in[step - 1] for step in GATES] == [2, 2, 2]
    assert groups_in[STEPS - 1] == 3
    # The slow group gets less, also right after the groups have changed.
    slow = [each for each in said[0] if each["what"] == "given" and each["step"] > 2]
    loads = [sum(SIZES[i] for i in each["indices"]) * each["participants"] for each in slow]
    whole = [sum(SIZES[i] for i in global_batch(each["step"])) for each in slow]
    share = sum(loads) / sum(whole)
    assert share < 0.75
    wanted = trained_alone()
    for name in ("a", "b", "c"):
        got = torch.load(groups.folder / f"{name}.0.pt")
        for key, value in wanted.items():
            torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12)


def test_groups_of_two_ranks(groups: Groups) -> None:
    ranks = [groups.start(name, rank=rank, ranks=2) for name in ("a", "b") for rank in range(2)]
    for process in ranks:
        groups.wait_for(process, "ended")
    parts = committed(groups.all_said())
    check_batches(parts)
    assert {len(of_step) for of_step in parts.values()} == {4}
    wanted = trained_alone()
    got = torch.load(groups.folder / "b.1.pt")
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-9, atol=1e-12)
