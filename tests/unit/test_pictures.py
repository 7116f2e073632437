"""Pictures of README and documents: each says what it shows and how it was made."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
SUFFIXES = {".png", ".svg", ".gif", ".jpg", ".jpeg", ".webp", ".mp4"}
PICTURES = sorted(path for path in IMAGES.rglob("*") if path.suffix in SUFFIXES)
_MARKDOWN = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
_IMG = re.compile(r'<img[^>]*?alt="([^"]*)"[^>]*?src="([^"]+)"')
_SOURCE = re.compile(r'<source[^>]*?srcset="([^"]+)"')


@pytest.fixture
def provenance(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import provenance

    return provenance


def shown() -> list[tuple[Path, str, Path]]:
    """Return each picture that a page shows: the page, the caption, the file."""
    pictures = []
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        text = page.read_text()
        captions = _MARKDOWN.findall(text) + _IMG.findall(text)
        captions += [("", source) for source in _SOURCE.findall(text)]
        pictures += [(page, caption, (page.parent / file).resolve()) for caption, file in captions]
    return pictures


def test_each_picture_has_its_provenance_and_its_script_is_unchanged(provenance: Any) -> None:
    assert [fault for path in PICTURES if (fault := provenance.fault(path))] == []


def test_a_missing_file_and_a_changed_script_are_found(
    provenance: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setattr(provenance, "commit", lambda: "943ee9a2")  # would start git
    monkeypatch.setattr(provenance, "machine", lambda: {"cores": 2})  # would start uname
    picture, script, record = tmp_path / "a.png", tmp_path / "make.py", tmp_path / "record.json"
    script.write_text('"""Draw."""\nx = "#1"  # one\n')
    record.write_text("{}")
    assert "a.json is missing" in provenance.fault(picture)
    made = provenance.made_by(script, "python make.py", [record])
    provenance.record(picture, "real ranks", made)
    assert provenance.fault(picture) == ""
    script.write_text('"""Draw a picture."""\n\nx = "#1"\n')
    assert provenance.fault(picture) == "", "only comments and docstrings are different"
    script.write_text('"""Draw."""\nx = "#2"  # one\n')
    assert "make.py has changed since; run `python make.py`" in provenance.fault(picture)
    script.write_text('x = "#1"\n')
    record.write_text("[]")
    assert "record.json has changed since" in provenance.fault(picture)
    record.write_text("{}")
    provenance.record(picture, "real ranks", made | {"commit": ""})
    assert "its fields are" in provenance.fault(picture)


def test_pages_show_every_picture_and_no_other() -> None:
    """A picture from elsewhere would have no provenance."""
    assert {file for _, _, file in shown()} == set(PICTURES)


def test_a_simulated_picture_says_so_inside_and_in_its_caption() -> None:
    for page, caption, file in shown():
        shows = json.loads(file.with_suffix(".json").read_text())["shows"]
        if "simulated" in shows:
            assert "simulated" in caption, (page, file)
            assert file.suffix == ".svg", f"{file}: nobody can check what a raster image says"
            assert f">{shows}<" in file.read_text(), file
