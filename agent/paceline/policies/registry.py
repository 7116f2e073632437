"""Registry of policies: the `Preset`s in the entry-point group ``paceline.policies``.

The group has Paceline's own presets and the presets of other installed packages. A preset that
cannot be loaded is left out, with an error in the log.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from paceline.policies.base import Policy, Preset
from paceline.policies.parameters import convert, with_presets
from paceline.wire.synchronisation import Synchronisation

logger = logging.getLogger(__name__)

GROUP = "paceline.policies"


class UnknownPolicyError(ValueError):
    """An unknown policy name. `suggestion` is the most similar policy name, or None."""

    def __init__(self, name: str) -> None:
        near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.5)
        self.suggestion = near[0] if near else None
        hint = f"did you mean {self.suggestion!r}? " if self.suggestion else ""
        super().__init__(f"policy: no policy {name!r}; {hint}known: {', '.join(names())}")


def names() -> list[str]:
    """Return the names of all registered policies, sorted."""
    return sorted(_presets())


def get(name: str) -> Preset[Any]:
    """Return the preset of this name.

    Raises:
        UnknownPolicyError: no preset has this name.
    """
    try:
        return _presets()[name]
    except KeyError:
        raise UnknownPolicyError(name) from None


def same(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return True if two sets of a preset's parameters are equal, with defaults for missing ones.

    If this server does not have the preset, it cannot know the defaults, and compares only the
    given values.
    """
    if first == second or name not in _presets():
        return first == second
    kind = get(name).parameters
    return bool(convert(name, kind, first) == convert(name, kind, second))


def make(
    name: str, parameters: Mapping[str, Any] | None = None, world: int | None = None
) -> Policy:
    """Make the policy of this name; parameters that are not given have their defaults.

    `world` is the number of ranks, which is the required length of parameters with a value for each
    rank; None: unknown yet.

    Raises:
        UnknownPolicyError: no policy has this name.
        PolicyParameterError: a parameter is unknown, or its value is not legal.
        ValueError: the policy's synchronisation is not valid, or `world` ranks cannot train with
            it: see `Synchronisation.defect`.
    """
    preset = get(name)
    values = convert(name, preset.parameters, parameters or {}, world)
    return _checked(name, preset.make(values), world)


def _checked(name: str, policy: Policy, world: int | None) -> Policy:
    how = policy.synchroniser
    if not isinstance(how, Synchronisation):
        return policy
    if defect := how.defect(world):
        raise ValueError(f"policy: {name}: {defect}")
    return policy


@cache
def _presets() -> dict[str, Preset[Any]]:
    presets: dict[str, Preset[Any]] = {}
    for entry in sorted(entry_points(group=GROUP), key=_is_foreign):
        if entry.name in presets:
            _left_out(entry, "another policy has this name")
        elif (preset := _load(entry)) is not None:
            presets[entry.name] = preset
    combined = sorted(name for name, preset in presets.items() if preset.combines)
    return {
        name: replace(preset, parameters=with_presets(preset.parameters, combined))
        for name, preset in presets.items()
    }


def _load(entry: EntryPoint) -> Preset[Any] | None:
    try:
        preset = entry.load()
        if not isinstance(preset, Preset) or preset.name != entry.name:
            _left_out(entry, "it is not a Preset of this name")
            return None
        # Check that the defaults alone are legal.
        convert(entry.name, preset.parameters, {})
    # One broken package must not stop every run.
    except Exception:
        _left_out(entry, "it cannot be loaded", exc_info=True)
        return None
    return preset


def _left_out(entry: EntryPoint, why: str, exc_info: bool = False) -> None:
    logger.error("policy %s = %s ignored: %s", entry.name, entry.value, why, exc_info=exc_info)


def _is_foreign(entry: EntryPoint) -> bool:
    return not entry.module.startswith("paceline.")
