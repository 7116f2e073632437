"""A run on several nodes, as their supervisors start it: nodes of one machine, with real ranks."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psutil
import pytest

from paceline.core import reform
from paceline.node import session
from paceline.node.link import Link
from paceline.node.rundir import Record
from paceline.node.supervisor import RankAccess, Supervisor
from paceline.wire import FAILED_ELSEWHERE, Hello, JoinRendezvous, Launch
from support.marks import some_long
from support.node import script, states, telemetry
from support.waiting import TRAINING_S, until

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(900)]
ENDLESS = 10_000  # epochs: more than any test waits for
KEY = bytes(range(32))
SCRIPT = Path(__file__).parents[2] / "support" / "several_script.py"


class Nodes:
    """Supervisors of one run, one for each node; the first serves the rendezvous."""

    def __init__(self, folder: Path, bus_url: str, nodes: tuple[int, int], *script: object) -> None:
        self.folder, self.bus_url = folder, bus_url
        self.by_name: dict[str, Supervisor] = {}
        self._links: list[Link] = []
        self._nodes = nodes
        self._script = [str(folder), *map(str, script)]
        self._host: Supervisor | None = None

    def connect(self, name: str) -> Link:
        """A node's connection to the bus, which answers."""
        link = Link(replace(session.without("", self.bus_url, name), key=KEY))
        self._links.append(link)
        assert link.attempt(lambda bus: bus.ping())
        return link

    def start(self, name: str, nproc: int = 1, **more: Any) -> Supervisor:
        """A node that waits for word where to meet the others."""
        least, most = self._nodes
        path = str(more.pop("script", SCRIPT))
        link = more.pop("link", None) or self.connect(name)
        launch = Launch(path, self._script, nproc, {}, nodes_min=least, nodes_max=most, **more)
        record = Record("r", name, "the test", "")
        data = self.folder / name
        supervisor = Supervisor(launch, data, record, link, RankAccess(self.bus_url, KEY))
        self.by_name[name] = supervisor
        supervisor.start()
        return supervisor

    def join(self, name: str, nproc: int = 1, **more: Any) -> Supervisor:
        supervisor = self.start(name, nproc, **more)
        self._host = self._host or supervisor
        served = self._host.delivery.record.states[0]
        supervisor.obey(JoinRendezvous(served.address, served.port, 0))
        return supervisor

    def poll(self) -> None:
        for supervisor in self.by_name.values():
            supervisor.poll()

    def lines(self) -> list[Any]:
        files = sorted(self.folder.glob("steps-*"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def newest(self) -> int:
        """The newest step that a rank has made."""
        return max((line[1] for line in self.lines() if isinstance(line, list)), default=-1)

    def enough(self) -> None:
        """Ends the training with its epoch."""
        (self.folder / "enough").touch()

    def reached(self, step: int, world: int) -> None:
        def there() -> bool:
            self.poll()
            steps = [line for line in self.lines() if isinstance(line, list)]
            return any(line[1] >= step and line[2] == world for line in steps)

        until(there, f"step {step} of {world} ranks", TRAINING_S)

    def go_on_for(self, seconds: float) -> None:
        """All nodes run for so long at least: more than an end in order takes."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.poll()
            assert all(supervisor.running for supervisor in self.by_name.values())
            time.sleep(0.05)

    def ended(self, *names: str) -> list[str]:
        def over() -> bool:
            self.poll()
            return all(not self.by_name[name].running for name in names)

        until(over, f"{names} to end", TRAINING_S)
        return [str(self.by_name[name].last.state) for name in names]

    def close(self) -> None:
        for supervisor in self.by_name.values():
            supervisor.close()
        for link in self._links:
            link.close()


@pytest.fixture
def started(tmp_path: Path, bus_url: str) -> Iterator[list[Nodes]]:
    made: list[Nodes] = []
    yield made
    for nodes in made:
        nodes.close()


def test_ranks_of_two_nodes_train_together(
    started: list[Nodes], tmp_path: Path, bus_url: str
) -> None:
    nodes = Nodes(tmp_path, bus_url, (2, 2), 1, 4, 0)
    started.append(nodes)
    nodes.join("left", 2)
    nodes.join("right", 2)
    assert nodes.ended("left", "right") == ["finished", "finished"], states(bus_url, "r")
    hello = next(m for _, m in telemetry(bus_url) if isinstance(m, Hello))
    assert (hello.world, sorted(hello.placement)) == (4, ["left", "left", "right", "right"])
    steps = [line for line in nodes.lines() if isinstance(line, list)]
    assert sorted({line[1] for line in steps}) == list(range(8))
    assert len(steps) == 32


def test_a_launch_looks_up_no_name(
    started: list[Nodes], tmp_path: Path, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent looks after other runs in the same thread, and a lookup may take long."""
    nodes = Nodes(tmp_path, bus_url, (1, 2), 1, 4, 0)
    started.append(nodes)
    link = nodes.connect("a")
    lookup = Mock(side_effect=AssertionError)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    supervisor = nodes.start("a", link=link)
    assert supervisor.last is not None
    assert (supervisor.last.state, supervisor.last.address) == ("starting", "127.0.0.1")
    lookup.assert_not_called()


def attempts(nodes: Nodes) -> list[tuple[int, int]]:
    """Attempts with the numbers of their ranks."""
    starts = [line for line in nodes.lines() if isinstance(line, dict)]
    return sorted({(line["attempt"], len(line["placement"])) for line in starts})


def in_order(parts: list[int], whole: list[int]) -> bool:
    """Whether the parts come in the whole in this order, whatever is between them."""
    rest = iter(whole)
    return all(part in rest for part in parts)


def test_a_node_joins_and_another_is_killed(
    started: list[Nodes], tmp_path: Path, bus_url: str
) -> None:
    """Neither counts as a failure: the run may not be restarted."""
    every = 2
    nodes = Nodes(tmp_path, bus_url, (1, 3), ENDLESS, every, 0.05)
    started.append(nodes)
    nodes.join("a")
    nodes.join("b")
    nodes.reached(10, 2)
    nodes.join("c")
    nodes.reached(20, 3)
    nodes.by_name["b"].kill()
    nodes.reached(nodes.newest() + 10, 2)
    nodes.enough()
    assert nodes.ended("a", "b", "c") == ["finished", "stopped", "finished"]
    steps = [line for line in nodes.lines() if isinstance(line, list)]
    different = {step for _, step, _ in steps}
    assert different == set(range(len(different)))
    again = len({tuple(line[:2]) for line in steps}) - len(different)
    tries = attempts(nodes)
    assert again <= every * (len(tries) - 1), "a change costs at most the steps since a checkpoint"
    assert in_order([2, 3, 2], [world for _, world in tries])


FAILS = """
    import os, sys, time
    import torch.distributed as dist
    dist.init_process_group("gloo")
    print("attempt", os.environ["PACELINE_ATTEMPT"], flush=True)
    if dist.get_rank() == 1:
        raise SystemExit(CODE)
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("restarts", "code"), some_long([(1, 7), (0, 7), (0, reform.EXIT_CODE)], 3)
)
def test_a_rank_that_fails_uses_up_restarts(
    started: list[Nodes], tmp_path: Path, bus_url: str, restarts: int, code: int
) -> None:
    """Also with the code that ranks end with when nodes join: nobody asked for that."""
    nodes = Nodes(tmp_path, bus_url, (2, 2))
    started.append(nodes)
    path = script(tmp_path, FAILS.replace("CODE", str(code)))
    for name in ("a", "b"):
        nodes.join(name, script=path, max_restarts=restarts)
    assert nodes.ended("a", "b") == ["failed", "failed"]
    last = {name: supervisor.last for name, supervisor in nodes.by_name.items()}
    assert {each.attempt for each in last.values() if each} == {restarts}
    messages = {name: str(each.message) for name, each in last.items() if each}
    [failed] = [
        name for name in "ab" if messages[name].startswith(f"rank 1 ended with code {code};")
    ]
    other = "ab".replace(failed, "")
    assert messages[other].startswith(f"{FAILED_ELSEWHERE}{failed}: rank 1 ended with code {code};")
    assert {each.exit_code for each in last.values() if each} == {code}


def test_no_step_is_lost_where_nodes_join_and_leave_in_order(
    started: list[Nodes], tmp_path: Path, bus_url: str
) -> None:
    """Checkpoints are far apart, and the run may not be restarted."""
    nodes = Nodes(tmp_path, bus_url, (1, 3), ENDLESS, 1_000, 0.05)
    started.append(nodes)
    nodes.join("a")
    nodes.join("b")
    nodes.reached(5, 2)
    nodes.join("c")
    nodes.reached(nodes.newest() + 5, 3)
    nodes.by_name["b"].stop("the node is needed elsewhere", leaves=True)
    nodes.reached(nodes.newest() + 5, 2)
    nodes.enough()
    assert nodes.ended("a", "b", "c") == ["finished", "stopped", "finished"]
    by_step: dict[int, set[int]] = {}
    for attempt, step, _ in (line for line in nodes.lines() if isinstance(line, list)):
        by_step.setdefault(step, set()).add(attempt)
    assert sorted(by_step) == list(range(len(by_step)))
    assert {len(tries) for tries in by_step.values()} == {1}, "no step was done again"
    assert in_order([2, 3, 2], [world for _, world in attempts(nodes)])


def test_the_others_say_that_the_rendezvous_is_gone(
    started: list[Nodes], tmp_path: Path, bus_url: str
) -> None:
    nodes = Nodes(tmp_path, bus_url, (1, 2), ENDLESS, 2, 0.05)
    started.append(nodes)
    nodes.join("a")
    nodes.join("b")
    nodes.reached(4, 2)
    nodes.by_name["a"].kill()
    assert nodes.ended("a", "b") == ["stopped", "failed"]
    last = nodes.by_name["b"].last
    assert last is not None
    assert str(last.message).startswith("the rendezvous at 127.0.0.1:")


# Takes part in a round of the rendezvous, and is killed before it answers the roll.
LOST = """
    import os, signal, sys
    from torch.distributed import TCPStore
    from paceline.node.elastic.rendezvous import together
    port, key = int(sys.argv[1]), bytes.fromhex(sys.argv[2])
    store = TCPStore("127.0.0.1", port, is_master=False)
    info = together("r", store, key, (2, 3), "127.0.0.1").next_rendezvous()
    print("took part with", info.world_size, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.long
def test_a_launcher_is_lost_between_a_round_and_its_roll(
    started: list[Nodes], tmp_path: Path, bus_url: str
) -> None:
    """The others meet again without it."""
    nodes = Nodes(tmp_path, bus_url, (2, 3), 4, 2, 0)
    started.append(nodes)
    host = nodes.join("a")
    port = host.delivery.record.states[0].port
    command = [sys.executable, script(tmp_path, LOST, "lost.py"), str(port), KEY.hex()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as lost:
        nodes.join("b")
        assert nodes.ended("a", "b") == ["finished", "finished"], states(bus_url, "r")
        assert lost.stdout is not None
        assert lost.stdout.read().startswith("took part with")
    assert lost.returncode == -signal.SIGKILL
    assert {world for _, world in attempts(nodes)} == {2}
    steps = [line for line in nodes.lines() if isinstance(line, list)]
    assert {step for _, step, _ in steps} == set(range(32))


@pytest.mark.parametrize("late", [pytest.param("a", marks=pytest.mark.long), "b"])
@pytest.mark.parametrize(
    "then", some_long(["raise SystemExit(7)", "open(sys.argv[1] + '/done', 'w').close()"])
)
def test_nodes_wait_for_the_slowest_script(
    started: list[Nodes], tmp_path: Path, bus_url: str, late: str, then: str
) -> None:
    """Node a serves the rendezvous. A long evaluation is not cut off; a late failure is one."""
    nodes = Nodes(tmp_path, bus_url, (2, 2))
    started.append(nodes)
    text = f"""
        import json, os, sys, time
        import torch.distributed as dist
        dist.init_process_group("gloo")
        node = json.loads(os.environ["PACELINE_PLACEMENT"])[dist.get_rank()]
        open(f"{{sys.argv[1]}}/pid-{{node}}", "w").write(str(os.getpid()))
        dist.barrier()
        dist.destroy_process_group()
        if node == {late!r}:
            while not os.path.exists(sys.argv[1] + "/goes on"):
                time.sleep(0.05)
            {then}
    """
    path = script(tmp_path, text)
    for name in ("a", "b"):
        nodes.join(name, script=path)
    early = tmp_path / f"pid-{'b' if late == 'a' else 'a'}"
    until(lambda: nodes.poll() or (early.exists() and early.read_text()), "the ranks", TRAINING_S)
    # A launcher reaps its ranks before it waits for the other's.
    until(lambda: not psutil.pid_exists(int(early.read_text())), "the first to end", TRAINING_S)
    nodes.go_on_for(8.0)
    (tmp_path / "goes on").touch()
    ends = dict(zip("ab", nodes.ended("a", "b"), strict=True))
    if "exit" in then.lower():
        assert ends[late] == "failed"
    else:
        assert ends == {"a": "finished", "b": "finished"}
        assert (tmp_path / "done").exists()
