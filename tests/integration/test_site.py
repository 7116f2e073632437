"""The documentation site builds without a warning and holds all that it is made from."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(folder)]
    ended = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert ended.returncode == 0, ended.stderr  # any warning ends it: a link, an anchor, a name
    return folder


def test_it_has_each_page_and_the_reference(site: Path) -> None:
    for page in (ROOT / "docs").rglob("*.md"):
        if page.name != "README.md":  # of decisions: their index
            assert (site / page.relative_to(ROOT / "docs")).with_suffix(".html").exists()
    for page, words in {
        "index": "Five lines of your script",
        "reference/library": "global_batch",
        "reference/policies": "Problem",
        "reference/command-line": "paceline resume",
        "reference/rest": "/api/v1/runs/{run}/policy",
    }.items():
        assert words in (site / f"{page}.html").read_text(), page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|source|iframe|link rel="(?:stylesheet|icon)")[^>]*https?://'
    )
    assert [page.name for page in site.rglob("*.html") if loads.search(page.read_text())] == []


def test_what_a_page_links_to_in_the_sources_is_there(site: Path) -> None:
    page = (site / "training-scripts.html").read_text()
    assert 'href="source/examples/plaid/' in page
    script = (site / "source/examples/plaid/train.py.html").read_text()
    assert "paceline.Session(" in re.sub("<[^>]*>", "", script)
