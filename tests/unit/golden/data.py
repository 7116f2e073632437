"""Reading and writing the recorded data, and how recorded values are compared."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "data"
DIGITS = 12  # of each digest
# Fields that some presets compute with BLAS, whose sums differ in the last bits from CPU to CPU.
_ROUNDED = ("ett_s", "memory", "shares")
_SIGNIFICANT = 9  # digits of their floats that count
_MOST_DIFFERENCES = 20


def load(name: str) -> Any:
    """The content of a recorded JSON file, by its name without suffixes."""
    with gzip.open(FOLDER / f"{name}.json.gz", "rt") as file:
        return json.load(file)


def save(name: str, content: Any) -> None:
    """Records a JSON file. The same content gives the same bytes."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    (FOLDER / f"{name}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def copy_of_database(folder: Path) -> Path:
    target = folder / "paceline.db"
    with gzip.open(FOLDER / "runs.db.gz") as source, target.open("wb") as copy:
        shutil.copyfileobj(source, copy)
    return target


def save_database(database: Path) -> None:
    (FOLDER / "runs.db.gz").write_bytes(gzip.compress(database.read_bytes(), 9, mtime=0))


def digest(value: Any) -> str:
    """The first digits of the SHA-256 of a value's canonical JSON; floats count bit by bit."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGITS]


def digests(segment: dict[str, Any]) -> dict[str, str]:
    """A digest of each field of a segment. Expected times, memory and shares are rounded before."""
    return {
        name: digest(rounded(value) if name in _ROUNDED else value)
        for name, value in segment.items()
    }


def rounded(value: Any) -> Any:
    """The same value with floats of 9 significant digits."""
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return float(f"{value:.{_SIGNIFICANT}g}") if isinstance(value, float) else value


def differences(recorded: Any, now: Any, where: str = "") -> list[str]:
    """One line for each value that is not as recorded, with its path; the first 20."""
    lines = []
    for line in _different(recorded, now, where):
        lines.append(line)
        if len(lines) == _MOST_DIFFERENCES:
            return [*lines, "… and perhaps more"]
    return lines


def _different(recorded: Any, now: Any, where: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(now, dict):
        for key in sorted(recorded):  # documents may grow
            path = f"{where}.{key}" if where else str(key)
            if key not in now:
                yield f"{path}: recorded {_short(recorded[key])}, is missing now"
            else:
                yield from _different(recorded[key], now[key], path)
    elif isinstance(recorded, list) and isinstance(now, list):
        if len(recorded) != len(now):
            yield f"{where}: recorded {len(recorded)} items, has {len(now)} now"
        for k, (before, after) in enumerate(zip(recorded, now, strict=False)):
            yield from _different(before, after, f"{where}[{k}]")
    elif json.dumps(recorded) != json.dumps(now):  # 1 is not 1.0, and NaN is as recorded
        yield f"{where}: recorded {_short(recorded)}, is {_short(now)} now"


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 100 else text[:100] + "…"
