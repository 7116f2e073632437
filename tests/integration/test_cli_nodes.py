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
    monkeypatch.setattr(nodes, "ALIVE_S", 3600)  # the machine may be busy
    monkeypatch.setenv("COLUMNS", "200")
    with Store.open(f"sqlite:///{tmp_path / 'paceline.db'}") as store:
        answer(store, "n1")
        answer(store, "n2", left=True)
        with serving(store, bus_url) as client:
            yield "--server", str(client.base_url).rstrip("/")


def test_nodes_are_listed_cordoned_and_uncordoned(main: Main, where: tuple[str, str]) -> None:
    code, out, _ = main("cordon", "n1", "--why", "its disk is slow", *where)
    assert (code, out) == (0, "node n1 is cordoned: `paceline uncordon n1` lifts it\n")
    lines = main("nodes", *where)[1].splitlines()
    first, second = (next(line for line in lines if name in line) for name in ("n1", "n2"))
    assert "answers" in first
    assert "its disk is slow" in first
    assert "silent" in second
    code, out, _ = main("uncordon", "n1", "--why", "it has another", *where)
    assert (code, out) == (0, "node n1 can get runs again\n")
    listed = json.loads(main("nodes", "--json", *where)[1])
    assert {node["id"]: node["cordoned"] for node in listed} == {"n1": None, "n2": None}
    changes = json.loads(main("audit", "--json", *where)[1])["items"]
    assert [(each["action"], each["target"], each["via"], each["why"]) for each in changes] == [
        ("node.uncordon", "n1", "cli", "it has another"),
        ("node.cordon", "n1", "cli", "its disk is slow"),
    ]


def test_what_cannot_be_cordoned_is_said(main: Main, where: tuple[str, str]) -> None:
    assert main("cordon", "n1", *where)[0] == 0
    code, _, err = main("cordon", "n1", *where)
    assert (code, "node n1 is cordoned by configured" in err) == (2, True)
    code, _, err = main("cordon", "no/such node", *where)
    assert code == 2
    assert err.startswith("paceline: ")
    code, _, err = main("uncordon", "n2", *where)
    assert (code, err) == (2, "paceline: node n2 is not cordoned\n")


def test_a_node_is_forgotten(main: Main, where: tuple[str, str]) -> None:
    code, _, err = main("nodes", "forget", "n1", *where)
    assert (code, "the agent of node n1 answers: stop it, or revoke its token" in err) == (2, True)
    code, out, _ = main("nodes", "forget", "n2", "--why", "sold", *where)
    assert (code, out) == (0, "node n2 is forgotten\n")
    assert [node["id"] for node in json.loads(main("nodes", "--json", *where)[1])] == ["n1"]


def test_spares_are_of_several_nodes(main: Main, where: tuple[str, str]) -> None:
    code, _, err = main("run", "--spares", "1", *where, "train.py")
    assert (code, err) == (2, "paceline: --spares and --replace-slow-nodes: only with --nodes\n")
