"""REST, replay and forecasts give the same about recorded runs as when they were recorded."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from unit.golden import data, documents, product


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = data.load(name)
    return content


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return data.copy_of_database(tmp_path_factory.mktemp("golden"))


@pytest.fixture(scope="module")
def answers(database: Path) -> dict[str, Any]:
    return documents.ask(database)


@pytest.mark.parametrize("path", sorted(recorded("documents")))
def test_rest_answers_the_same_documents(path: str, answers: dict[str, Any]) -> None:
    before, now = documents.sorted_enums(recorded("documents")[path]), answers[path]
    if path == "/metrics":  # lines: there may be more
        before, now = dict.fromkeys(before), dict.fromkeys(now)
    lines = data.differences(before, now)
    assert not lines, f"GET {path} is not as recorded:\n" + "\n".join(lines)


@pytest.mark.parametrize("run", sorted(recorded("replays")))
def test_replay_plans_the_same_again(run: str, database: Path) -> None:
    before = recorded("replays")[run]
    assert before["identical"] == before["segments"], "as recorded"
    assert not data.differences(before, product.replayed(database, run))


def test_forecasts_come_out_the_same(database: Path) -> None:
    lines = data.differences(recorded("forecasts"), documents.forecasts(database))
    assert not lines, "forecasts are not as recorded:\n" + "\n".join(lines)
