"""Presets of packages for the release before, whose parameters are a mapping of JSON Schema.

They work for one more release, with a warning. Remove this file, `schemas` and
`Preset.__post_init__` with the release after 0.2.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from copy import copy
from functools import partial
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from paceline_backend.policies.parameters import Parameters


def adapt(preset: Any) -> None:
    """Gives a preset a class for its mapping, and a `make` that takes an instance of this class.

    The preset's own `make` gets a mapping, as before. Other presets stay as they are.
    """
    if not isinstance(preset.parameters, Mapping):
        return
    warnings.warn(
        f"preset {preset.name}: parameters as a mapping of JSON Schema work until the next "
        "release; write a class derived from paceline_backend.policies.Parameters instead, with "
        "a field for each parameter, and let `make` read parameters.<name> "
        "(docs/writing-a-policy.md)",
        FutureWarning,  # Python hides a DeprecationWarning of an imported module
        stacklevel=4,  # who makes the preset
    )
    kind = _class_of(preset.name, preset.parameters)
    object.__setattr__(preset, "parameters", kind)
    object.__setattr__(preset, "make", _from_mapping(preset.make))


def _from_mapping(make: Callable[[Mapping[str, Any]], Any]) -> Callable[[Any], Any]:
    def made(parameters: Parameters | Mapping[str, Any]) -> Any:
        if isinstance(parameters, Parameters):
            parameters = msgspec.structs.asdict(parameters)
        return make(parameters)

    return made


def _class_of(preset: str, schemas: Mapping[str, Mapping[str, Any]]) -> type[Parameters]:
    fields: list[Any] = []
    for name, schema in schemas.items():
        field: list[Any] = [name, Annotated[Any, Meta(extra_json_schema=dict(schema))]]
        if "default" in schema:
            field.append(msgspec.field(default_factory=partial(copy, schema["default"])))
        fields.append(tuple(field))
    kind: Any = msgspec.defstruct(preset, fields, bases=(Parameters,), kw_only=True)
    return kind  # type: ignore[no-any-return]
