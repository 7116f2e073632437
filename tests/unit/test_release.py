"""What a release must agree on with itself."""

from __future__ import annotations

import re
from pathlib import Path

import paceline

ROOT = Path(__file__).parents[2]


def test_newest_version_in_the_changelog_is_this_one() -> None:
    first = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert first is not None
    assert first[1] == paceline.__version__
