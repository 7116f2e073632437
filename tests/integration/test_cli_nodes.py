"""`paceline nodes`, `cordon` and `uncordon` against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_backend.store import Store, nodes
from support.command_line import Main
from support.groups import answer
from support.web import serving


@pytest.fixture
def where(
    tmp_path: Path, bus_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[str, str]]:
    """A server with two nodes, as options name it."""
    monkeypatch.setattr(nodes, "NODE_ALIVE_S", 3600)  # the machine may be busy
    monkeypatch.setenv("COLUMNS", "200")
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store:
        answer(store, "n1")
        answer(store, "n2", left=True)
        with serving(store, bus_url) as client:
            yield "--server", str(client.base_url).rstrip("/")


def test_a_node_is_forgotten(main: Main, where: tuple[str, str]) -> None:
    code, _, err = main("nodes", "forget", "n1", *where)
    assert (code, "the agent of node n1 answers: stop it, or revoke its token" in err) == (2, True)
    code, out, _ = main("nodes", "forget", "n2", "--why", "sold", *where)
    assert (code, out) == (0, "node n2 is forgotten\n")
    assert [node["id"] for node in json.loads(main("nodes", "--json", *where)[1])] == ["n1"]


def test_spares_are_of_several_nodes(main: Main, where: tuple[str, str]) -> None:
    code, _, err = main("run", "--spares", "1", *where, "train.py")
    assert (code, err) == (2, "paceline: --spares and --replace-slow-nodes: only with --nodes\n")
