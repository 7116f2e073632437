"""Messages about values that a typed message or a policy's parameters do not allow."""

from __future__ import annotations

import re

import msgspec

_PLACE = re.compile(r"(?s)(?P<what>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?")
_FIELD = re.compile(r"Object (?P<what>contains unknown|missing required) field `(?P<field>.*)`")
_SAYS = {"contains unknown": "is not a known field", "missing required": "is missing"}


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
