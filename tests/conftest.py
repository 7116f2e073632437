"""Real servers, started once a session on free ports and stopped at its end."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:  # imported by the fixtures: unit tests need no server
    from paceline_backend.server.embedded import EmbeddedBus
    from paceline_backend.server.stack import Stack
    from support.postgres import Postgres

# --hypothesis-profile NAME chooses another than the first. No deadlines: the machine may be busy,
# and the time that an example takes says nothing.
settings.register_profile("paceline", deadline=None, max_examples=60)
settings.register_profile("fast", deadline=None, max_examples=10)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("paceline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Takes turns between folders, so that browsers or trainings do not all run at the same time.

    Within a folder, files with many tests come first. The unit tests' short files come last, when
    workers end at different times.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    by_folder: dict[str, list[Path]] = {}
    for path in sorted(files, key=lambda path: -len(files[path])):
        folder = path.relative_to(Path(__file__).parent).parts[0]
        by_folder.setdefault(folder, []).append(path)
    turns = {
        path: (folder == "unit", (place + 0.5) / len(paths))
        for folder, paths in by_folder.items()
        for place, path in enumerate(paths)
    }
    items.sort(key=lambda item: turns[item.path])


@pytest.fixture(scope="session")
def _bus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedBus]:
    from paceline_backend.server.embedded import EmbeddedBus

    with EmbeddedBus(tmp_path_factory.mktemp("bus")) as bus:
        yield bus


@pytest.fixture
def bus_url(_bus: EmbeddedBus) -> str:
    """A running, empty Redis-protocol server."""
    import redis

    with redis.Redis.from_url(_bus.url) as client:
        client.flushall()
    return _bus.url


@pytest.fixture(scope="session")
def _postgres() -> Iterator[Postgres]:
    from support.postgres import Postgres

    server = Postgres().start()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgres"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A fresh, empty database: every test that takes this runs over both kinds."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'paceline.db'}"
    server: Postgres = request.getfixturevalue("_postgres")
    return server.database()


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    """A running embedded stack: server, bus, SQLite and one agent."""
    from paceline_backend.server.stack import Stack

    with Stack(tmp_path / "data", 0) as running:
        yield running
