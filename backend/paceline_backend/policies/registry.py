"""Which policies there are: the `Preset`s in the entry-point group ``paceline.policies``."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.wire.synchronisation import Synchronisation
from paceline_backend.policies.base import Policy, Preset

logger = logging.getLogger(__name__)

GROUP = "paceline.policies"

_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
}
_BOUNDS = (("at least", "minimum"), ("above", "exclusiveMinimum"), ("at most", "maximum"))


class UnknownPolicyError(ValueError):
    """No policy has this name. `suggestion` is the nearest that has one, or None."""

    def __init__(self, name: str) -> None:
        near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.5)
        self.suggestion = near[0] if near else None
        hint = f"did you mean {self.suggestion!r}? " if self.suggestion else ""
        super().__init__(f"policy: no policy {name!r}; {hint}known: {', '.join(names())}")


class PolicyParameterError(ValueError):
    """A parameter that the policy does not take, or a value that is not legal for it."""


def names() -> list[str]:
    """All registered policies, sorted."""
    return sorted(_presets())


def get(name: str) -> Preset:
    """The preset of this name.

    Raises:
        UnknownPolicyError: there is none.
    """
    try:
        return _presets()[name]
    except KeyError:
        raise UnknownPolicyError(name) from None


def make(
    name: str, parameters: Mapping[str, Any] | None = None, world: int | None = None
) -> Policy:
    """The policy of this name; parameters that are not given have their defaults.

    Args:
        name: of the preset.
        parameters: by name.
        world: ranks of the run that it is for, if it is for one: parameters with a value for each
            rank must have as many.

    Raises:
        UnknownPolicyError: no such policy.
        PolicyParameterError: a parameter is unknown or its value not legal.
        ValueError: the policy has a synchroniser that ranks do not know, or parameters that the
            synchroniser does not take.
    """
    preset = get(name)
    values = _validated(preset, parameters or {})
    if world is not None:
        _check_per_rank(preset, values, world)
    return _checked(name, preset.make(values), world)


def _checked(name: str, policy: Policy, world: int | None) -> Policy:
    how = policy.synchroniser
    if not isinstance(how, Synchronisation):
        return policy
    if problem := how.problem(world):
        raise ValueError(f"policy: {name}: {problem}")
    return policy


@cache
def _presets() -> dict[str, Preset]:
    presets: dict[str, Preset] = {}
    for entry in sorted(entry_points(group=GROUP), key=_is_foreign):
        what = f"policy {entry.name} = {entry.value} left out"
        if entry.name in presets:
            logger.error("%s: there is another of this name", what)
            continue
        try:
            preset = entry.load()
        except Exception:  # one broken package must not stop every run
            logger.exception("%s: it does not load", what)
            continue
        if isinstance(preset, Preset) and preset.name == entry.name:
            presets[entry.name] = preset
        else:
            logger.error("%s: it is not a Preset of this name", what)
    combined = sorted(name for name, preset in presets.items() if preset.combines)
    return {name: _with_batches(preset, combined) for name, preset in presets.items()}


def _with_batches(preset: Preset, names: list[str]) -> Preset:
    """The preset, with the names of all whose batches it may take, if it takes some."""
    batches = preset.parameters.get("batches")
    if batches is None or "enum" in batches or "default" not in batches:
        return preset
    if batches.get("type") != "string":  # a third party's parameter of the same name
        return preset
    ordered = sorted(names, key=lambda name: name != batches["default"])  # the default first
    return replace(
        preset, parameters={**preset.parameters, "batches": {**batches, "enum": ordered}}
    )


def _is_foreign(entry: EntryPoint) -> bool:
    return not entry.module.startswith("paceline_backend.")


def _validated(preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    values = {name: schema["default"] for name, schema in preset.parameters.items()}
    for name, value in given.items():
        if name not in values:
            takes = ", ".join(values) or "none"
            raise PolicyParameterError(
                f"parameters.{name}: {preset.name} has no such parameter; it takes: {takes}"
            )
        schema = preset.parameters[name]
        if not _legal(schema, value):
            raise PolicyParameterError(
                f"parameters.{name}: {value!r} is not legal for {preset.name}; "
                f"it must be {_described(schema)}"
            )
        values[name] = value
    return values


def _check_per_rank(preset: Preset, values: Mapping[str, Any], world: int) -> None:
    for name, schema in preset.parameters.items():
        given = len(values[name]) if schema.get("perRank") else 0
        if given not in (0, world):
            raise PolicyParameterError(
                f"parameters.{name}: {given} values given, but the run has {world} ranks; "
                "give one for each rank, or none"
            )


def _legal(schema: Mapping[str, Any], value: Any) -> bool:
    if schema["type"] == "array":
        return isinstance(value, list | tuple) and all(_legal(schema["items"], v) for v in value)
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


def _described(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(repr(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"a list, each item {_described(schema['items'])}"
    bounds = [f"{word} {schema[key]}" for word, key in _BOUNDS if key in schema]
    return " ".join([f"of type {schema['type']}", " and ".join(bounds)]).strip()
