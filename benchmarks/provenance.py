"""Provenance of pictures: commit, command, machine and script.

`scripts/screenshots.py` and `benchmarks/ledger.py` draw every picture of the documentation, and
write a JSON file of the same name beside each picture. `tests/unit/test_pictures.py` fails if the
file is missing, or if the script's statements have changed since. In that case the picture may no
longer show what the script draws, and its command must be run again.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import tokenize
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness import commit, machine

ROOT = Path(__file__).parents[1]
FIELDS = {"shows", "commit", "command", "machine", "script", "code_sha256", "records"}
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_sha256(script: Path) -> str:
    """Return the SHA-256 of a Python file's statements, without comments and docstrings.

    Imports do not count either: a module that moves changes no picture.
    """
    text = script.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for row in range(node.lineno - 1, node.end_lineno or node.lineno):
                lines[row] = ""
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[row] = ""
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()


def made_by(script: Path, command: str, records: Iterable[Path] = ()) -> dict[str, Any]:
    """Return the provenance of a picture that `script` draws now with `command`.

    `records` are files of earlier measurements that the script reads. Each of them names its
    machine.
    """
    return {
        "commit": commit(),
        "command": command,
        "machine": machine(),
        "script": str(script.relative_to(ROOT)),
        "code_sha256": code_sha256(script),
        "records": {str(path.relative_to(ROOT)): _sha256(path) for path in sorted(records)},
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def record(picture: Path, shows: str, made: dict[str, Any]) -> None:
    """Write the JSON file beside a picture.

    `shows` is "simulated …" for a simulation, or else describes what ran. `made` is the result of
    `made_by` at the time of the measurement.
    """
    whole = {"shows": shows, **made}
    picture.with_suffix(".json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def fault(picture: Path) -> str:
    """Return the reason why a picture's provenance is not valid, with the command to run; or ""."""
    beside = picture.with_suffix(".json")
    if not beside.exists():
        return f"{picture.name}: {beside.name} is missing; make the picture with its script"
    made = json.loads(beside.read_text())
    if set(made) != FIELDS or not all(made[field] for field in FIELDS - {"records"}):
        return f"{beside.name}: its fields are {sorted(made)}, and must be {sorted(FIELDS)}"
    script = ROOT / made["script"]
    if not script.is_file() or code_sha256(script) != made["code_sha256"]:
        return f"{picture.name}: {made['script']} has changed since; run `{made['command']}`"
    for path, sha256 in made["records"].items():
        if not (ROOT / path).is_file() or _sha256(ROOT / path) != sha256:
            return f"{picture.name}: {path} has changed since; run `{made['command']}`"
    return ""
