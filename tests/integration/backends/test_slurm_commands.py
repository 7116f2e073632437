"""What Slurm's commands are asked, and what their answers mean: commands that a test makes up."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from paceline_backend import backends
from paceline_backend.backends import slurm
from paceline_backend.backends.slurm import Slurm, SlurmOptions

ORDER = backends.Order(
    label="paceline.plane.run.0.0",
    run="3f9a1c07be52",
    nodes=2,
    nproc=4,
    cwd="/shared",
    options=SlurmOptions(partition="gpu", time_limit="1:00:00", setup="module load 'x'"),
    server="http://head:8000",
    token="pl_1_secret",
)


def commands(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> None:
    """Puts commands of a made-up Slurm first in the path."""
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_what_sbatch_gets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No secret in its arguments, none of this process's in its environment."""
    text = f'cd {tmp_path}; printf "%s\\n" "$@" >words; env >env; cat >script; echo "17;cluster"'
    commands(tmp_path, monkeypatch, sbatch=text)
    monkeypatch.setenv("PACELINE_TOKEN", "the admin's")
    assert Slurm().submit(ORDER) == "17"
    words = (tmp_path / "words").read_text().split("\n")
    assert {"--parsable", "--nodes=2", "--cpus-per-task=4", "--partition=gpu"} <= set(words)
    assert {"--time=1:00:00", "--comment=paceline.plane.run.0.0", "--chdir=/shared"} <= set(words)
    assert "secret" not in str(words)
    assert "PACELINE" not in (tmp_path / "env").read_text()
    script = tmp_path / "script"
    subprocess.run(["sh", "-n", script], check=True)
    assert "export PACELINE_TOKEN=pl_1_secret\nmodule load 'x'\n" in script.read_text()


@pytest.mark.parametrize(
    "said, raised",
    [
        ("sbatch: error: invalid partition specified: gpu", backends.EngineRefusedError),
        ("slurm_load_jobs error: Unable to contact slurm controller", backends.EngineAwayError),
        ("Batch job submission failed: Socket timed out on send/recv", backends.EngineAwayError),
    ],
)
def test_what_sbatch_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, raised: type[Exception]
) -> None:
    commands(tmp_path, monkeypatch, sbatch=f"echo '{said}' >&2; exit 1")
    with pytest.raises(raised, match=said[-10:]):
        Slurm().submit(ORDER)


def test_what_squeue_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = (
        "17|PENDING|Resources|paceline.plane.run.0.0",
        "18|RUNNING|None|paceline.plane.run.0.1",
        "19|COMPLETING|None|paceline.plane.run.0.2",
        "20|TIMEOUT|TimeLimit|paceline.plane.run.0.3",
        "21|COMPLETED|None|paceline.plane.run.0.4",
        "22|RUNNING|None|paceline.other.run.0.0",
        "23|RUNNING|None|(null)",
    )
    text = "\n".join(f"echo '{line}'" for line in lines)
    commands(tmp_path, monkeypatch, squeue=text)
    jobs = Slurm().look("paceline.plane.")
    assert [(job.ref, job.state, job.reason) for job in jobs] == [
        ("17", "queued", "Resources"),
        ("18", "running", "None"),
        ("19", "running", "None"),
        ("20", "ended", "TIMEOUT (TimeLimit)"),
        ("21", "ended", "COMPLETED"),
    ]


def test_a_machine_without_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    found = Slurm().availability()
    assert not found.reachable
    assert "install Slurm" in str(found.problem)
    with pytest.raises(backends.EngineAwayError, match="no command squeue"):
        Slurm().look("paceline.")


def test_a_slurm_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_TIMEOUT_S", 0.01)
    commands(tmp_path, monkeypatch, squeue="exec sleep 60")
    with pytest.raises(backends.EngineAwayError, match="did not answer"):
        Slurm().look("paceline.")


def test_jobs_that_have_ended_are_stopped_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "echo 'scancel: error: Kill job error on job id 17: Invalid job id' >&2; exit 1"
    commands(tmp_path, monkeypatch, scancel=text)
    Slurm().stop(["17"])
    Slurm().stop([])


NODE = "NodeName=gpu7 Arch=x86_64 State={} ThreadsPerCore=1{}"


@pytest.mark.parametrize(
    "control, state, said, reason, update",
    [
        ("", "IDLE", "", "ada: slow\n disk", "State=DRAIN Reason=paceline: ada: slow disk"),
        ("", "IDLE+DRAIN", " Reason=paceline: b", "ada: c", "State=DRAIN Reason=paceline: ada: c"),
        ("", "IDLE+DRAIN", " Reason=a fan [root@2026]", "ada: slow", None),
        ("", "MIXED+DRAIN", " Reason=paceline: ada: slow [root@2026]", None, "State=UNDRAIN"),
        ("", "DOWN", " Reason=bad disk [root@2026]", "ada: slow", None),
        ("", "IDLE+DRAIN", " Reason=a fan [root@2026]", None, None),
        ("", "IDLE", "", None, None),
        # Of two control planes each keeps to its own.
        ("a1", "IDLE", "", "ada: slow", "State=DRAIN Reason=paceline:a1 ada: slow"),
        ("a1", "IDLE+DRAIN", " Reason=paceline:a1 ada: slow", None, "State=UNDRAIN"),
        ("a1", "IDLE+DRAIN", " Reason=paceline:b2 ada: slow", None, None),
        ("a1", "IDLE+DRAIN", " Reason=paceline:b2 ada: slow", "ada: slow", None),
        ("a1", "IDLE+DRAIN", " Reason=paceline: ada: slow", None, None),
    ],
)
def test_a_node_is_drained_and_a_drain_of_others_stays(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    control: str,
    state: str,
    said: str,
    reason: str | None,
    update: str | None,
) -> None:
    show = f"echo '{NODE.format(state, said)}'"
    text = f'if [ "$1" = update ]; then echo "$@" >>{tmp_path}/asked; else {show}; fi'
    commands(tmp_path, monkeypatch, scontrol=text)
    if control:
        Slurm().cordon_as(control, "gpu7", reason)
    else:
        Slurm().cordon("gpu7", reason)
    asked = tmp_path / "asked"
    assert (asked.read_text() if asked.exists() else None) == (
        update and f"update NodeName=gpu7 {update}\n"
    )


@pytest.mark.parametrize("host", ["ALL", "gpu[1-9]", "gpu1,gpu2", "", "-n"])
def test_only_a_node_can_be_drained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """A node says itself what it is called."""
    commands(tmp_path, monkeypatch, scontrol=f"touch {tmp_path}/asked")
    with pytest.raises(backends.EngineRefusedError, match="not a valid node name"):
        Slurm().cordon(host, "slow")
    assert not (tmp_path / "asked").exists()


def test_a_node_that_is_gone_has_no_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, scontrol='echo "Node gpu7 not found" >&2; exit 1')
    Slurm().cordon("gpu7", None)
    with pytest.raises(backends.EngineRefusedError, match="not found"):
        Slurm().cordon("gpu7", "slow")


def test_who_may_not_drain_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = "slurm_update error: Invalid user id"
    text = f'[ "$1" = update ] || exec echo "{NODE.format("IDLE", "")}"; echo "{error}" >&2; exit 1'
    commands(tmp_path, monkeypatch, scontrol=text)
    with pytest.raises(backends.EngineRefusedError, match="Invalid user id"):
        Slurm().cordon("gpu7", "slow")


def test_machines_are_avoided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands(tmp_path, monkeypatch, sbatch=f'printf "%s\\n" "$@" >{tmp_path}/words; echo 17')
    order = replace(ORDER, avoid=["gpu7", "gpu8", "n[1-999]"], options=SlurmOptions(exclude="gpu1"))
    Slurm().submit(order)
    assert "--exclude=gpu1,gpu7,gpu8" in (tmp_path / "words").read_text()
