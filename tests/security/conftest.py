"""A platform in a directory that others may enter, with two trainings: a thief's and a victim's."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline_backend.server.embedded import EmbeddedBus
from paceline_backend.server.stack import Stack
from paceline_backend.store import Store
from support.sites import Site, a_run
from support.strangers import SCRIPT, Field, with_runs
from support.web import serving


@pytest.fixture(scope="module")  # its ranks are not to be seen by tests of other modules
def field() -> Iterator[Field]:
    folder = Path(tempfile.mkdtemp(prefix="paceline-security-"))
    folder.chmod(0o755)
    (folder / "train.py").write_text(SCRIPT)
    before = os.umask(0o022)  # of most systems
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_STATE_HOME", str(folder / "state"))
            with Stack(folder / "data", 0) as stack:
                yield with_runs(stack, folder)
    finally:
        os.umask(before)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    with EmbeddedBus(folder / "bus") as bus:
        store = Store.open(f"sqlite:///{folder / 'paceline.db'}")
        with serving(store, bus.url) as admin:
            a_run(store, admin)
            yield Site(store, admin)
