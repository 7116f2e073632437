"""Validation that message types cannot express, and descriptions of invalid values.

Any program may write to the bus, so a message that decodes may still hold values that a database
rejects or a reader cannot use. Each function ``of_…`` describes the first invalid value, naming its
field, or returns None. `worded` describes a value that a decoder rejects, in a message or in a
policy's parameters.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

# Maximum number of levels of nesting of a plain value.
DEEPEST = 32
_PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?")
_FIELD = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`")
_SAYS = {"contains unknown": "is not a known field", "missing required": "is missing"}


def of_plain(value: Any, place: str, depth: int = 0) -> str | None:
    """Describe the first value that JSON or MessagePack cannot hold: NaN, a 70-bit integer, …

    `place` is the name of the field; `depth` is the number of lists and mappings around the value.
    """
    if depth > DEEPEST:
        return f"{place} is nested more than {DEEPEST} levels deep"
    if value is None or isinstance(value, bool):
        return None
    if isinstance(value, int):
        return None if -(2**63) <= value < 2**64 else f"{place} is an integer of more than 64 bits"
    if isinstance(value, str):
        return of_text(value, place)
    if isinstance(value, float):
        return None if math.isfinite(value) else f"{place} is {value}, not a finite number"
    if isinstance(value, list | tuple):
        reasons = (of_plain(item, f"{place}[]", depth + 1) for item in value)
        return next(filter(None, reasons), None)
    if not isinstance(value, dict):
        return f"{place} is of type {type(value).__name__}, which JSON does not support"
    for key, item in value.items():
        if not isinstance(key, str):
            return f"{place} has the key {key!r}: keys must be strings"
        reason = of_text(key, f"a key of {place}")
        if reason := reason or of_plain(item, f"{place}.{key}"[:200], depth + 1):
            return reason
    return None


def of_text(value: str, place: str) -> str | None:
    """Describe a text that UTF-8 cannot encode, because it contains a lone surrogate."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return f"{place} is {value[:50]!a}, which UTF-8 cannot encode"
    return None


def of_whole(message: Any, bounds: Mapping[str, int]) -> str | None:
    """Describe the first field that is negative, or not below its bound."""
    for name, bound in bounds.items():
        if not 0 <= getattr(message, name) < bound:
            return f"{name} is {getattr(message, name)}: it must be at least 0 and below {bound}"
    return None


def of_times(message: Any, names: Sequence[str]) -> str | None:
    """Describe the first of the fields `names`, all times, that is negative, infinite or NaN."""
    for name in names:
        if not 0 <= getattr(message, name) < math.inf:
            return f"{name} is {getattr(message, name)}, not a finite number of at least 0"
    return None


def worded(error: msgspec.ValidationError, within: str = "") -> str:
    """Describe an invalid value, with the field first: ``parameters.probes: expected `int` >= 1``.

    `within` is the field that holds the value, such as ``parameters``.
    """
    match = _PLACE.fullmatch(str(error))
    assert match is not None
    what, path = match["what"], [within, match["path"] or ""]
    if field := _FIELD.fullmatch(what):
        path.append(field["field"])
        what = _SAYS[field["what"]]
    place = ".".join(part for part in path if part)
    return f"{place}: {what[:1].lower()}{what[1:]}" if place else what
