"""Provenance of pictures: the commit, the command, the machine and the script that made them.

`scripts/screenshots.py` and `benchmarks/ledger.py` draw every picture of the documents. Beside each
picture they write a JSON file of the same name. `tests/unit/test_pictures.py` fails where that file
is missing, and where the script's statements have changed since: then the picture no longer
shows what the script makes, and its command must be run again.
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
    """Return the SHA-256 of a Python file's statements, without comments and docstrings."""
    text = script.read_text()
    lines = text.splitlines()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node) is not None:
            docstring = node.body[0]
            for row in range(docstring.lineno - 1, docstring.end_lineno or docstring.lineno):
                lines[row] = ""
    code = "\n".join(line.rstrip() for line in lines if line.strip())
    return hashlib.sha256(code.encode()).hexdigest()


def made_by(script: Path, command: str, records: Iterable[Path] = ()) -> dict[str, Any]:
    """Return how a picture is made that a script draws now.

    Args:
        records: files of earlier measurements that the script reads; each names its machine.
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

    Args:
        shows: "simulated …" of a simulation; else what ran.
        made: from `made_by`, at the time of the measurement.
    """
    whole = {"shows": shows, **made}
    picture.with_suffix(".json").write_text(json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def fault(picture: Path) -> str:
    """Return why a picture's provenance does not hold, with the command to run; else ""."""
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
