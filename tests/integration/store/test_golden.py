"""A database of the release that made it opens, and REST and replay tell the same of its runs."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from unit.golden import data, documents, product

NEWER: set[str] = set()  # presets that came after the documents were recorded


@functools.cache
def recorded(name: str) -> dict[str, Any]:
    content: dict[str, Any] = data.load(name)
    return content


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the recorded database, migrated to this release's tables."""
    copy = data.copy_of_database(tmp_path_factory.mktemp("golden"))
    product.migrated(copy)
    return copy


@pytest.fixture(scope="module")
def answers(database: Path) -> dict[str, Any]:
    return documents.ask(database)


def without_newer(value: Any) -> Any:
    """A document without the entries about presets that came after it was recorded."""
    if isinstance(value, dict):
        return {key: without_newer(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_newer(item) for item in value if not _is_newer(item)]
    return value


def _is_newer(item: Any) -> bool:
    return isinstance(item, dict) and not NEWER.isdisjoint({item.get("name"), item.get("policy")})


def test_every_get_route_was_asked() -> None:
    """Of those that were there: else a document could change unseen."""
    asked = {_template(path) for path in recorded("documents")}
    lines = recorded("interface")["rest"]
    known = {line.split()[1] for line in lines if line.startswith("GET ")}
    assert known <= asked


def _template(path: str) -> str:
    plain = path.partition("?")[0]
    parts = plain.split("/")
    if plain.startswith("/api/v1/runs/"):
        parts[4] = "{run}"
    return "/".join(parts)


@pytest.mark.parametrize("path", sorted(recorded("documents")))
def test_rest_answers_the_same_documents(path: str, answers: dict[str, Any]) -> None:
    before, now = documents.sorted_enums(recorded("documents")[path]), answers[path]
    if path == "/metrics":  # lines: there may be more
        before, now = dict.fromkeys(before), dict.fromkeys(now)
    lines = data.differences(before, without_newer(now))
    assert not lines, f"GET {path} is not as recorded:\n" + "\n".join(lines)


@pytest.mark.parametrize("run", sorted(recorded("replays")))
def test_replay_plans_the_same_again(run: str, database: Path) -> None:
    before = recorded("replays")[run]
    assert before["identical"] == before["segments"], "as recorded"
    assert not data.differences(before, product.replayed(database, run))


def test_forecasts_come_out_the_same(database: Path) -> None:
    lines = data.differences(recorded("forecasts"), without_newer(documents.forecasts(database)))
    assert not lines, "forecasts are not as recorded:\n" + "\n".join(lines)
