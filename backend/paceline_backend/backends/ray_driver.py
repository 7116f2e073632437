"""What runs on Ray for a job of ours: its driver, and a keeper beside each node.

`backends.ray` sends this file with each job. So it imports nothing of ours, and Ray's Python needs
no package of ours. The driver asks for a placement group with a bundle on each of so many nodes:
all at once or none. An actor in each bundle starts a keeper, which starts ``paceline node``.

A keeper is a process of its own because Ray kills the children of a worker that ends, by SIGKILL:
then the keeper is gone, the kernel sends the node SIGTERM, and the node leaves its run in order.
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

NAME = "paceline_ray.py"  # of this file in a job's directory
SETTINGS = "paceline_ray.json"
FAILED = "nodes failed: "  # begins the line of a driver's log that says why
GRACE_S = 30.0  # a node that was asked to leave is killed after this time

_PR_SET_PDEATHSIG = 1
_LOOK_S = 1.0
_log = logging.getLogger(__name__)


class Node:
    """An actor of Ray: has a node kept in its bundle.

    Args:
        number: of the bundle.
    """

    def __init__(self, number: int) -> None:
        import ray

        host = ray.get_runtime_context().get_node_id()
        words = [sys.executable, str(Path(NAME).resolve()), "keep", str(number), str(os.getpid())]
        self._keeper = subprocess.Popen([*words, host], start_new_session=True)

    def run(self) -> int:
        """Waits for the node's end; its exit code."""
        return self._keeper.wait()

    def stop(self) -> None:
        """Asks the node to leave."""
        self._keeper.terminate()


def drive(settings: dict[str, Any]) -> int:
    """The driver: gets the nodes, and waits until all of them have ended; 0 if all did well."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # a line of one node is not another's
    import ray

    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    ray.init()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())  # Ray has put in its own
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
            _log.info("The nodes are asked to leave.")
            for node in nodes:
                node.stop.remote()
        done, _ = ray.wait(list(waiting), timeout=_LOOK_S)
        for reference in done:
            number = waiting.pop(reference)
            ended[number] = _end(reference)
            _log.info("Node %d: %s", number, ended[number] or "exit code 0")
    failed = [f"node {number}: {end}" for number, end in sorted(ended.items()) if end]
    if failed:
        _log.error("%s%s", FAILED, "; ".join(failed))
    return 1 if failed else 0


def _granted(settings: dict[str, Any], stopping: threading.Event) -> Any:
    """The placement group, once Ray has created it; None: the job was stopped before."""
    from ray.util import placement_group

    bundles = [settings["bundle"]] * settings["nodes"]
    more = {}
    if settings["avoid"]:
        other = {"ray.io/node-id": f"!in({','.join(settings['avoid'])})"}
        more["bundle_label_selector"] = [other] * len(bundles)
    group = placement_group(bundles, strategy="STRICT_SPREAD", name=settings["name"], **more)
    while not group.wait(_LOOK_S):
        if stopping.is_set():
            return None
    return group


def _node(settings: dict[str, Any], group: Any, number: int) -> Any:
    """An actor in one bundle, with all of the bundle's resources."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    rest = dict(settings["bundle"])
    options = {
        "num_cpus": rest.pop("CPU"),
        "num_gpus": rest.pop("GPU", 0),
        "memory": rest.pop("memory", None),
        "resources": rest,
        "max_concurrency": 2,  # `stop` while `run` waits
        "scheduling_strategy": PlacementGroupSchedulingStrategy(group, number),
    }
    return ray.remote(Node).options(**options).remote(number)


def _end(reference: Any) -> str:
    """How a node ended, in words; empty: with exit code 0."""
    import ray

    try:
        code = ray.get(reference)
    except ray.exceptions.RayError as error:  # its worker or its machine is gone
        return str(error).strip().partition("\n")[0]
    return f"exit code {code}" if code else ""


def keep(settings: dict[str, Any], number: int, parent: int, host: str) -> int:
    """The keeper: starts the node, hands SIGTERM on, and kills a node that does not leave.

    Args:
        settings: of the job.
        number: of the bundle.
        parent: process id of the actor's worker; when it dies, the node has to leave.
        host: the machine's id in Ray.
    """
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # workers of Ray ignore and block some signals
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
        if asked.is_set() and kill_at is None:  # once: a second SIGTERM would kill the ranks
            kill_at = time.monotonic() + GRACE_S
            node.terminate()
        elif kill_at is not None and time.monotonic() > kill_at:
            os.killpg(node.pid, signal.SIGKILL)
        time.sleep(0.2)
    return node.returncode if node.returncode >= 0 else 128 - node.returncode  # as sh says it


def main(words: list[str]) -> int:
    """Runs what the command line names: ``drive``, or ``keep NUMBER PARENT HOST``."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    settings = json.loads(Path(__file__).with_name(SETTINGS).read_text())
    if words[0] == "keep":
        return keep(settings, int(words[1]), int(words[2]), words[3])
    return drive(settings)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
