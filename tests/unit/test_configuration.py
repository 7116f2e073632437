"""The configuration file: options from a file that only its owner reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import cli, configuration
from paceline.core.errors import InputError
from paceline.node import private


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.toml"
    monkeypatch.setenv("PACELINE_CONFIG", str(path))
    return path


def write(path: Path, text: str, mode: int = 0o600) -> None:
    path.write_text(text)
    path.chmod(mode)


def said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *args: str) -> str:
    monkeypatch.setattr(sys, "argv", ["paceline", *args])
    monkeypatch.setattr(private, "files", lambda: None)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    out = capsys.readouterr()
    return f"{caught.value.code} {out.out}{out.err}"


def test_options_come_from_the_file(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(file, '[runs]\nserver = "http://127.0.0.1:1"\nlimit = 900\n')
    assert "or equal to 500" in said(monkeypatch, capsys, "runs")
    assert "no server answers at http://127.0.0.1:1" in said(
        monkeypatch, capsys, "runs", "--limit", "3"
    )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[runs]\nservr = 'x'", "runs: unknown setting 'servr'; known: "),
        ("[rusn]\nserver = 'x'", "unknown setting 'rusn'; known: "),
        ("[runs]\nlimit 3", "config.toml: "),
    ],
)
def test_what_is_unknown_is_refused(
    file: Path,
    text: str,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(file, text)
    answer = said(monkeypatch, capsys, "runs")
    assert answer.startswith("2 paceline: ")
    assert says in answer


def test_a_file_that_others_may_read_is_refused(file: Path) -> None:
    write(file, "", 0o640)
    with pytest.raises(InputError, match=f"other users may read {file}; run chmod 600 {file}"):
        configuration.defaults(cli.app)
    file.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        configuration.defaults(cli.app)


@given(st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1))
def test_a_secret_is_the_text_of_its_file(text: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "token"
        write(path, f"  {text}\n")
        if text.strip():
            assert private.secret("--token-file", path) == text.strip()
        else:
            with pytest.raises(InputError, match="is empty"):
                private.secret("--token-file", path)
