"""How launchers of a run on several nodes agree, without processes."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousStateError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import _NodeDesc

from paceline.node import logs, rundir
from paceline.node.elastic import roll
from paceline.node.elastic.ranks import _Logs
from paceline.node.elastic.rendezvous import Alone, Members, Signed, together, use_interface
from paceline.node.elastic.roll import FirstFailure, Roll, RollRound
from paceline.node.machine import address_towards
from paceline.node.processes import number_of, reserved_port


class Exploit:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self._path,)


def test_a_state_that_a_stranger_wrote_is_not_unpickled(tmp_path: Path) -> None:
    store = HashStore()
    own = Signed(store, "r", b"key")
    stranger = C10dRendezvousBackend(store, "r")
    stranger.set_state(pickle.dumps(Exploit(tmp_path / "owned")))
    with pytest.raises(RendezvousStateError, match="not from a launcher of this run"):
        own.get_state()
    assert not (tmp_path / "owned").exists()


def test_another_runs_launcher_is_a_stranger() -> None:
    store = HashStore()
    Signed(store, "r", b"another key").set_state(b"state")
    with pytest.raises(RendezvousStateError):
        Signed(store, "r", b"key").get_state()


def test_launchers_of_a_run_read_each_other() -> None:
    store = HashStore()
    first, second = Signed(store, "r", b"key"), Signed(store, "r", b"key")
    assert first.get_state() is None
    written = first.set_state(b"first")
    assert written is not None
    assert written[2]
    assert second.get_state() == (b"first", written[1])
    late = second.set_state(b"second", None)
    assert late is not None
    assert (late[0], late[2]) == (b"first", False), "the first stands"
    later = second.set_state(b"second", late[1])
    assert later is not None
    assert later[::2] == (b"second", True)


def fails(node: str, at: float = 0.0) -> FirstFailure:
    return FirstFailure(node, at, 1, f"rank of {node}")


class Rolls:
    """The rolls of some nodes, over rounds."""

    def __init__(self) -> None:
        self.store = HashStore()
        self.by_node: dict[str, Roll] = {}
        self.rounds = 0

    def call(self, *nodes: str, failed: str = "") -> RollRound:
        """A round of these nodes, in this order of ranks; what all of them know then."""
        self.rounds += 1
        store = PrefixStore(f"{self.rounds}", self.store)
        for node in nodes:
            self.by_node.setdefault(node, Roll(self.store, node, 4))

        def answer(index: int) -> RollRound:
            own = self.by_node[nodes[index]]
            at = failed.find(nodes[index])
            return own.call(store, index, len(nodes), None if at < 0 else fails(nodes[index], at))

        with ThreadPoolExecutor(len(nodes)) as pool:
            known = list(pool.map(answer, range(len(nodes))))
        assert all(each == known[0] for each in known)
        return known[0]


def test_all_launchers_know_the_same_attempt() -> None:
    rolls = Rolls()
    assert rolls.call("a", "b") == RollRound(4, ["a", "b"], 0)
    assert rolls.call("c", "a", "b") == RollRound(5, ["c", "a", "b"], 0), "who joins knows it, too"


def test_a_failure_counts_once_for_all_ranks_that_fail_by_it() -> None:
    rolls = Rolls()
    rolls.call("a", "b")
    assert rolls.call("a", "b", failed="a b").failures == 1
    assert rolls.call("a", "b", failed="b").failures == 2


def test_the_first_failure_is_the_cause_of_the_others() -> None:
    rolls = Rolls()
    assert rolls.call("a", "b", "c").cause is None
    assert rolls.call("a", "b", "c", failed="ca").cause == fails("c", 0)
    assert rolls.call("a", "b", "c").cause is None


def test_clocks_that_are_apart_do_not_change_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock of node b is 100 s ahead; a rank of b failed 5 s before that of a."""
    store = HashStore()
    rolls = {node: Roll(store, node, 0) for node in "ab"}
    ahead_s = threading.local()
    real = time.time
    monkeypatch.setattr(roll.time, "time", lambda: real() + getattr(ahead_s, "b", 0.0))

    def call(node: str, number: int, failure: FirstFailure | None = None) -> RollRound:
        ahead_s.b = 100.0 if node == "b" else 0.0
        return rolls[node].call(PrefixStore(str(number), store), "ab".index(node), 2, failure)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(call, "ab", [1, 1]))
        at = real()
        failures = [fails("a", at), fails("b", at + 100.0 - 5.0)]
        known = list(pool.map(call, "ab", [2, 2], failures))
    assert [each.cause and each.cause.node for each in known] == ["b", "b"]


def test_a_failure_as_a_node_joins_does_not_count() -> None:
    """Ranks of one node may fail because those of another were ended first."""
    rolls = Rolls()
    rolls.call("a", "b")
    assert rolls.call("a", "b", "c", failed="b").failures == 0


def test_a_failure_as_a_node_is_lost_does_not_count() -> None:
    rolls = Rolls()
    rolls.call("a", "b", "c")
    assert rolls.call("a", "c", failed="a c").failures == 0
    assert rolls.call("a", "c", failed="a").failures == 1


def test_a_round_waits_for_those_of_the_round_before() -> None:
    """But not for those that are gone."""
    store = HashStore()
    a, b, c = (_NodeDesc(name, 1, 0) for name in "abc")
    members, others = Members(store), Members(store)
    assert not members.known(), "in the first round, nobody knows who may come"
    members.begin_round(a, [a, b, c])
    assert others.known() == {str(each) for each in (a, b, c)}, "new launchers know it, too"
    assert not members.are_in([a, b])
    others.note_gone([c])
    assert members.are_in([a, b])
    assert not members.are_in([a])
    others.begin_round(c, [a, b, c])
    assert not members.are_in([a, b]), "it came back"


def test_an_interface_that_is_not_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    assert use_interface("127.0.0.1") is None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "wan7")
    assert "GLOO_SOCKET_IFNAME is 'wan7', but this node's interfaces are" in str(
        use_interface("127.0.0.1")
    )


def test_the_address_towards_another_is_not_looked_up() -> None:
    assert address_towards("127.0.0.1") == "127.0.0.1"
    with pytest.raises(OSError, match=r"known|address"):
        address_towards("localhost")


# The ranks' port


def test_nobody_is_given_the_ranks_port_before_rank_0_listens_there() -> None:
    """Rank 0 imports torch for seconds; a launcher beside it asks for any free port meanwhile."""
    handler = Alone("r")
    info = handler.next_rendezvous().bootstrap_store_info
    assert info is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", info.master_port))
    store = TCPStore("127.0.0.1", info.master_port, None, is_master=True, wait_for_workers=False)
    assert store.port == info.master_port
    second = handler.next_rendezvous().bootstrap_store_info
    assert second is not None
    assert second.master_port != info.master_port
    handler.shutdown()
    with reserved_port(second.master_port) as again:
        assert number_of(again) == second.master_port


def test_launchers_of_several_nodes_keep_the_ranks_port_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("paceline.node.elastic.rendezvous._LAST_CALL_S", 0.1)
    handler = together("r", HashStore(), b"key", (1, 1), "127.0.0.1")
    info = handler.next_rendezvous()
    assert info.rank == 0
    assert info.bootstrap_store_info is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", info.bootstrap_store_info.master_port))
    handler.leave()
    with reserved_port(info.bootstrap_store_info.master_port):
        pass


def test_logs_of_the_newest_attempts_are_kept(tmp_path: Path) -> None:
    made = _Logs(tmp_path)
    for attempt in range(13):
        made.attempt = attempt
        made.reify({0: {"RANK": "0"}})
    assert logs.attempts(tmp_path) == list(range(12, 2, -1))


def test_all_logs_that_grow_are_kept_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "KEPT_FIRST", 4096)
    monkeypatch.setattr(logs, "KEPT_LAST", 4096)
    made = _Logs(tmp_path)
    made.reify({0: {"RANK": "0"}})
    grown = [
        tmp_path / "launcher.log",
        *(rundir.rank_log(tmp_path, 0, 0, output) for output in ("stdout", "stderr")),
    ]
    for log in grown:
        log.write_bytes(b"x" * 200_000)
    made.shorten()
    assert all(log.stat().st_blocks * 512 <= 4096 + 3 * 4096 for log in grown)
