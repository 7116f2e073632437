"""What a pod's container does: its script, as the first process of a namespace if that can be."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from paceline_backend import backends
from paceline_backend.backends.kubernetes import KubernetesOptions, manifests
from support.waiting import DEADLINE_S, until

FIRST = ("unshare", "--pid", "--fork", "--kill-child")
NODE = "node --run run --slot pod-1 --host gpu7"


def container(folder: Path, setup: str, node: str) -> str:
    """The script of a container whose node is a script, too."""
    command = folder / "command"
    command.write_text(f"#!/bin/sh\n{node}\n")
    command.chmod(0o755)
    options = KubernetesOptions(setup=setup, paceline=str(command))
    order = backends.Order("paceline.plane.run.0.0", "run", 1, 1, "/", options, "http://head", "t")
    job = manifests.job(order, options, "i")
    script = str(job["spec"]["template"]["spec"]["containers"][0]["command"][-1])
    return script.replace(manifests.STATE, str(folder))


def start(script: str) -> tuple[subprocess.Popen[bytes], bool]:
    """Runs it; and whether it is the first process of a namespace, which this user may not make."""
    first = subprocess.run([*FIRST, "true"], capture_output=True, check=False).returncode == 0
    env = {**os.environ, "POD_NAME": "pod-1", "NODE_NAME": "gpu7"}
    words = [*(FIRST if first else ()), "/bin/sh", "-c", script]
    return subprocess.Popen(words, env=env, start_new_session=True), first


def test_it_becomes_a_node_once(tmp_path: Path) -> None:
    """A second start, as after its processes were killed, ends well and does nothing."""
    script = container(tmp_path, "export A='b c'", f'echo "$A" "$@" >>{tmp_path}/seen; exit 7')
    for code in (7, 0):
        process, _ = start(script)
        assert process.wait(DEADLINE_S) == code
        assert (tmp_path / "seen").read_text() == f"b c {NODE}\n"


@pytest.mark.parametrize("when", ["setup", "node"])
def test_it_heeds_sigterm(tmp_path: Path, when: str) -> None:
    """While a line of the setup runs, and when the node does, which takes its time to leave."""
    ready = tmp_path / "ready"
    setup = f"touch {ready}; sleep 600" if when == "setup" else ""
    leave = f"trap 'echo left >{tmp_path}/left; exit 3' TERM; touch {ready}"
    process, first = start(container(tmp_path, setup, f"{leave}; while :; do sleep 0.1; done"))
    try:
        until(ready.exists, "the container", DEADLINE_S)
        # `unshare` hands no signal on.
        target = psutil.Process(process.pid).children()[0].pid if first else process.pid
        os.kill(target, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == (143 if when == "setup" else 3)
    finally:
        with contextlib.suppress(ProcessLookupError):  # all of it is gone
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert (tmp_path / "left").exists() == (when == "node")
