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
from paceline_backend.policies.parameters import convert, with_presets

logger = logging.getLogger(__name__)

GROUP = "paceline.policies"


class UnknownPolicyError(ValueError):
    """No policy has this name. `suggestion` is the nearest that has one, or None."""

    def __init__(self, name: str) -> None:
        near = difflib.get_close_matches(name.lower(), names(), n=1, cutoff=0.5)
        self.suggestion = near[0] if near else None
        hint = f"did you mean {self.suggestion!r}? " if self.suggestion else ""
        super().__init__(f"policy: no policy {name!r}; {hint}known: {', '.join(names())}")


def names() -> list[str]:
    """All registered policies, sorted."""
    return sorted(_presets())


def get(name: str) -> Preset[Any]:
    """The preset of this name.

    Raises:
        UnknownPolicyError: there is none.
    """
    try:
        return _presets()[name]
    except KeyError:
        raise UnknownPolicyError(name) from None


def same(name: str, first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Whether parameters of a preset are the same; those that are not given have their defaults.

    The defaults of a preset that this server does not have are unknown.
    """
    if first == second or name not in _presets():
        return first == second
    kind = get(name).parameters
    return bool(convert(name, kind, first) == convert(name, kind, second))


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
    values = convert(name, preset.parameters, parameters or {}, world)
    return _checked(name, preset.make(values), world)


def _checked(name: str, policy: Policy, world: int | None) -> Policy:
    how = policy.synchroniser
    if not isinstance(how, Synchronisation):
        return policy
    if problem := how.problem(world):
        raise ValueError(f"policy: {name}: {problem}")
    return policy


@cache
def _presets() -> dict[str, Preset[Any]]:
    presets: dict[str, Preset[Any]] = {}
    for entry in sorted(entry_points(group=GROUP), key=_is_foreign):
        if entry.name in presets:
            _left_out(entry, "there is another of this name")
        elif (preset := _load(entry)) is not None:
            presets[entry.name] = preset
    combined = sorted(name for name, preset in presets.items() if preset.combines)
    return {
        name: replace(preset, parameters=with_presets(preset.parameters, combined))
        for name, preset in presets.items()
    }


def _load(entry: EntryPoint) -> Preset[Any] | None:
    """The entry point's preset; None, and an error in the log, if there is no usable one."""
    try:
        preset = entry.load()
        if not isinstance(preset, Preset) or preset.name != entry.name:
            _left_out(entry, "it is not a Preset of this name")
            return None
        convert(entry.name, preset.parameters, {})  # the defaults alone
    except Exception:  # one broken package must not stop every run
        _left_out(entry, "it does not load", exc_info=True)
        return None
    return preset


def _left_out(entry: EntryPoint, why: str, exc_info: bool = False) -> None:
    logger.error("policy %s = %s left out: %s", entry.name, entry.value, why, exc_info=exc_info)


def _is_foreign(entry: EntryPoint) -> bool:
    return not entry.module.startswith("paceline_backend.")
