"""Parameters of presets: their base class, their JSON Schema, and checks of given values.

The registry calls `convert` before it makes a policy, and `with_presets` to limit the values of
`BatchesOf` fields.

    class Parameters(parameters.Parameters, frozen=True, kw_only=True):
        alpha: Annotated[float, Meta(gt=0, le=1, description="Weight of the newest step.")] = 0.3

    properties(Parameters)["alpha"]["exclusiveMinimum"]  # 0
    convert("mine", Parameters, {"alpha": 0.5}).alpha  # 0.5
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from operator import ne
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

_BOUNDS = {
    "at least": "minimum",
    "above": "exclusiveMinimum",
    "at most": "maximum",
    "below": "exclusiveMaximum",
}


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base class of a preset's parameters, without any fields of its own.

    Each field of a subclass is a number, a boolean, a string, a `Literal` or a `PerRank`, and has a
    default. `msgspec.Meta` contains its description and its bounds.
    """


P = TypeVar("P", bound=Parameters)

# Key in a field's JSON Schema that marks the field as a `BatchesOf`; `properties` omits the key.
_PRESETS = "presets"

# Type of a field whose value is the name of a preset with `Preset.combines`.
BatchesOf = Annotated[
    str,
    Meta(
        description="Name of the preset that chooses each rank's samples. The preset is used with "
        "its default parameters.",
        extra_json_schema={_PRESETS: True},
    ),
]

# Type of a field with one number for each rank, for example a capacity. An empty tuple: not given.
PerRank = Annotated[
    tuple[Annotated[float, Meta(gt=0, le=1e24)], ...], Meta(extra_json_schema={"perRank": True})
]


class PolicyParameterError(ValueError):
    """An unknown parameter of a policy, or a value that is not legal for it."""


def properties(kind: type[Parameters]) -> Mapping[str, Mapping[str, Any]]:
    """Return the JSON Schema of each parameter, by name."""
    return _properties(kind)


@cache
def _properties(kind: type[Parameters]) -> Mapping[str, Mapping[str, Any]]:
    return {
        name: {key: value for key, value in schema.items() if key != _PRESETS}
        for name, schema in _marked(kind).items()
    }


@cache
def _marked(kind: type[Parameters]) -> Mapping[str, Mapping[str, Any]]:
    (of_kind,), components = msgspec.json.schema_components([kind], ref_template="{name}")
    schemas: dict[str, dict[str, Any]] = components[of_kind["$ref"]]["properties"]
    for name, hint in get_type_hints(kind).items():
        # In msgspec's schema of a Literal, the values are sorted, and the type is missing.
        if get_origin(hint) is Literal:
            values = get_args(hint)
            of = "string" if isinstance(values[0], str) else "integer"
            schemas[name] |= {"type": of, "enum": list(values)}
    # Encode and decode the schemas as JSON, so that defaults that are tuples become lists.
    plain: dict[str, dict[str, Any]] = msgspec.json.decode(msgspec.json.encode(schemas))
    return plain


def convert(preset: str, kind: type[P], given: Mapping[str, Any], world: int | None = None) -> P:
    """Check the given parameters of a preset, and return them with defaults for all others.

    `world` is the number of ranks, which is the required length of a `PerRank`; None: unknown yet.

    Raises:
        PolicyParameterError: a parameter is unknown, or its value is not legal.
    """
    schemas, types = properties(kind), _types(kind)
    for name, value in given.items():
        if name not in schemas:
            takes = ", ".join(schemas) or "none"
            raise PolicyParameterError(
                f"parameters.{name}: {preset} has no such parameter; it takes: {takes}"
            )
        if not _legal(types[name], value, schemas[name]):
            raise PolicyParameterError(
                f"parameters.{name}: {value!r} is not legal for {preset}; "
                f"it must be {_described(schemas[name])}"
            )
    try:
        values = msgspec.convert(dict(given), kind)
    # The class of the parameters may reject combinations of values that are legal one by one.
    except msgspec.ValidationError as error:
        raise PolicyParameterError(f"parameters: not legal for {preset}: {error}") from error
    if world is not None:
        _check_per_rank(values, world)
    return values


def with_presets(kind: type[P], names: list[str]) -> type[P]:
    """Return a subclass of `kind` whose `BatchesOf` fields accept only the presets in `names`.

    The JSON Schema of such a field lists the default first.
    """
    types, marked = _types(kind), _marked(kind)
    fields: list[Any] = []
    for name in [name for name, schema in marked.items() if _PRESETS in schema]:
        default = marked[name]["default"]
        ordered = sorted(names, key=partial(ne, default))
        enum = Meta(extra_json_schema={"enum": ordered})
        fields.append((name, Annotated[types[name], enum], default))
    if not fields:
        return kind
    narrowed: Any = msgspec.defstruct(kind.__name__, fields, bases=(kind,), kw_only=True)
    return narrowed  # type: ignore[no-any-return]


def _types(kind: type[Parameters]) -> dict[str, Any]:
    return {field.encode_name: field.type for field in msgspec.structs.fields(kind)}


def _legal(kind: Any, value: Any, schema: Mapping[str, Any]) -> bool:
    try:
        msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    # The type of a `BatchesOf` is `str`; only its schema contains the legal values.
    return value in schema.get("enum", [value])


def _check_per_rank(values: Parameters, world: int) -> None:
    for name, schema in properties(type(values)).items():
        given = len(getattr(values, name)) if schema.get("perRank") else 0
        if given not in (0, world):
            raise PolicyParameterError(
                f"parameters.{name}: {given} values given, but the run has {world} ranks; "
                "give one for each rank, or none"
            )


def _described(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(repr(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"a list, each item {_described(schema['items'])}"
    bounds = [f"{word} {schema[key]}" for word, key in _BOUNDS.items() if key in schema]
    return " ".join([f"of type {schema['type']}", " and ".join(bounds)]).strip()
