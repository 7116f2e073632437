"""Which values a parameter's JSON Schema allows, for the presets that `mappings` adapts.

Their fields are of type `Any`: nothing but the schema says what is legal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TYPES: Mapping[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
}


def allows(schema: Mapping[str, Any], value: Any) -> bool:
    """Whether a value is legal."""
    if schema["type"] == "array":
        return isinstance(value, list | tuple) and all(allows(schema["items"], v) for v in value)
    if not isinstance(value, _TYPES[schema["type"]]):
        return False
    if isinstance(value, bool) and schema["type"] != "boolean":
        return False
    if "enum" in schema:
        return value in schema["enum"]
    # Written so that NaN is refused.
    above = "minimum" not in schema or value >= schema["minimum"]
    beyond = "exclusiveMinimum" not in schema or value > schema["exclusiveMinimum"]
    below = "maximum" not in schema or value <= schema["maximum"]
    return above and beyond and below
