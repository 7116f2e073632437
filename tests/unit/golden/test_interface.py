"""What clients and operators rely on may grow, but nothing of it goes away."""

from __future__ import annotations

from typing import Any

import pytest

from unit.golden import data, documents

# FastAPI's own description of a 422, which no release ever answered: it was a problem document.
_NEVER_ANSWERED = " 422 application/json"


@pytest.fixture(scope="module")
def now(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return documents.interface(data.copy_of_database(tmp_path_factory.mktemp("golden")))


@pytest.mark.parametrize("kind", ["commands", "rest"])
def test_nothing_has_gone(kind: str, now: dict[str, Any]) -> None:
    gone = sorted(set(data.load("interface")[kind]) - set(now[kind]))
    gone = [line for line in gone if _NEVER_ANSWERED not in line]
    assert not gone, "recorded, but not there now:\n" + "\n".join(gone)


def test_ranks_of_the_release_are_still_understood(now: dict[str, Any]) -> None:
    before = data.load("interface")
    assert now["versions"]["protocol"] == before["versions"]["protocol"]
    assert now["migrated"]["revision"] >= before["migrated"]["revision"]
