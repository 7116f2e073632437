"""Processes of a Paceline job on Ray: the driver, and a keeper (supervisor) of each node.

`backends.ray` sends this file with each job. It imports no module of Paceline, so Ray's Python need
not have Paceline installed. The driver requests a placement group with one bundle on each node, all
at once or none. An actor in each bundle starts a keeper, which starts ``paceline node``.

The keeper is separate from the node, because Ray sends SIGKILL to the children of a worker that
ends. If SIGKILL ends the keeper, the kernel sends SIGTERM to the node (see ``prctl`` in `keep`),
and the node leaves its run cleanly.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

# Names of this file and of the settings in a job's directory.
NAME = "paceline_ray.py"
SETTINGS = "paceline_ray.json"
# Start of the line in a driver's log that gives the reason of a failure.
FAILED = "nodes failed: "
# Seconds that a node has to leave its run before it is killed.
NODE_LEAVE_S = 30.0

_PR_SET_PDEATHSIG = 1
_NODES_POLL_S = 1.0
_log = logging.getLogger(__name__)


class Node:
    """Ray actor that starts the keeper of a node in its bundle, whose index is `number`."""

    def __init__(self, number: int) -> None:
        import ray

        host = ray.get_runtime_context().get_node_id()
        words = [sys.executable, str(Path(NAME).resolve()), "keep", str(number), str(os.getpid())]
        self._keeper = subprocess.Popen([*words, host], start_new_session=True)

    def run(self) -> int:
        """Wait for the node's end, and return its exit code."""
        return self._keeper.wait()

    def stop(self) -> None:
        """Ask the node to leave its run."""
        self._keeper.terminate()


def drive(settings: dict[str, Any]) -> int:
    """Run the driver: start the nodes, wait for their end, and return 0 if all succeeded."""
    # Keep equal log lines of different nodes, which Ray would otherwise merge.
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    import ray

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    ray.init()
    # Set the handler again, because `ray.init` has replaced it.
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    group = _granted(settings, stopping)
    if group is None:
        return 1
    nodes = [_node(settings, group, number) for number in range(settings["nodes"])]
    waiting = {node.run.remote(): number for number, node in enumerate(nodes)}
    asked = False
    ended: dict[int, str] = {}
    while waiting:
        if stopping.is_set() and not asked:
            asked = True
            _log.info("Asking the nodes to leave their run.")
            for node in nodes:
                node.stop.remote()
        done, _ = ray.wait(list(waiting), timeout=_NODES_POLL_S)
        for reference in done:
            number = waiting.pop(reference)
            ended[number] = _end(reference)
            _log.info("Node %d ended: %s", number, ended[number] or "exit code 0")
    failed = [f"node {number}: {end}" for number, end in sorted(ended.items()) if end]
    if failed:
        _log.error("%s%s", FAILED, "; ".join(failed))
    return 1 if failed else 0


def _granted(settings: dict[str, Any], stopping: threading.Event) -> Any:
    """Return the placement group once Ray has created it, or None if the job was stopped first."""
    from ray.util import placement_group

    bundles = [settings["bundle"]] * settings["nodes"]
    more = {}
    if settings["avoid"]:
        other = {"ray.io/node-id": f"!in({','.join(settings['avoid'])})"}
        more["bundle_label_selector"] = [other] * len(bundles)
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=settings["name"], **more)
    while not group.wait(_NODES_POLL_S):
        if stopping.is_set():
            return None
    return group


def _node(settings: dict[str, Any], group: Any, number: int) -> Any:
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rest = dict(settings["bundle"])
    options = {
        "num_cpus": rest.pop("CPU"),
        "num_gpus": rest.pop("GPU", 0),
        "memory": rest.pop("memory", None),
        "resources": rest,
        # `stop` must be callable while `run` waits.
        "max_concurrency": 2,
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
    }
    return ray.remote(Node).options(**options).remote(number)


def _end(reference: Any) -> str:
    """Return the exit code or error with which a node ended, as text; empty for exit code 0."""
    import ray

    try:
        code = ray.get(reference)
    # The actor's worker process or its machine was lost.
    except ray.exceptions.RayError as error:
        return str(error).strip().partition("\n")[0]
    return f"exit code {code}" if code else ""


def keep(settings: dict[str, Any], number: int, parent: int, host: str) -> int:
    """Run the keeper: start the node, forward SIGTERM, and kill a node that does not leave.

    Args:
        number: index of the bundle.
        parent: PID of the actor's worker process. When this process dies, the node must leave.
        host: Ray's id of the machine.
    """
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    # The keeper inherits ignored and blocked signals from Ray's worker: reset them.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        return 1
    try:
        node = subprocess.Popen(
            ["sh", "-c", settings["script"], "sh", f"{settings['slot']}.{number}", host],
            cwd=settings["cwd"],
            env={**os.environ, **settings["env"]},
            start_new_session=True,
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
    except OSError as error:
        _log.error("The node cannot be started: %s", error)
        return 1
    kill_at = None
    while node.poll() is None:
        # Send SIGTERM only once, because a second one would kill the ranks.
        if asked.is_set() and kill_at is None:
            kill_at = time.monotonic() + NODE_LEAVE_S
            node.terminate()
        elif kill_at is not None and time.monotonic() > kill_at:
            os.killpg(node.pid, signal.SIGKILL)
        time.sleep(0.2)
    # Report a signal as a shell does, by 128 plus its number.
    return node.returncode if node.returncode >= 0 else 128 - node.returncode


def main(words: list[str]) -> int:
    """Run the command ``drive`` or ``keep NUMBER PARENT HOST``."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = json.loads(Path(__file__).with_name(SETTINGS).read_text())
    if words[0] == "keep":
        return keep(settings, int(words[1]), int(words[2]), words[3])
    return drive(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
