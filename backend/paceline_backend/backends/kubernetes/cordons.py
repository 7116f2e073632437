"""Whose a machine's cordon is, and what to write so that it is ours or no more. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

REASON = "paceline-cordoned"  # annotations of a machine: why it is cordoned,
PLANE = "paceline-cordoned-by"  # and by which control plane


def manager(plane: str) -> str:
    """What the API server calls a control plane in `managedFields`, where it keeps who set what."""
    return f"paceline-{plane}" if plane else "paceline"


def change(node: Mapping[str, Any], plane: str, reason: str | None) -> dict[str, Any] | None:
    """A merge patch that cordons a machine, or lifts that; None: all stays as it is.

    Args:
        node: the machine, as the API server has it.
        plane: id of the control plane.
        reason: why it is cordoned; None: the control plane's cordon is lifted.
    """
    annotations = node["metadata"].get("annotations", {})
    ours = REASON in annotations and annotations.get(PLANE, "") == plane
    theirs = bool(node["spec"].get("unschedulable")) and (not ours or _set_by_others(node, plane))
    if reason is None:
        lifted = {"metadata": {"annotations": {REASON: None, PLANE: None}}}
        kept = lifted if theirs else lifted | {"spec": {"unschedulable": None}}
        return kept if ours else None
    if theirs:
        return None
    words = {REASON: reason, PLANE: plane or None}
    return {"metadata": {"annotations": words}, "spec": {"unschedulable": True}}


def _set_by_others(node: Mapping[str, Any], plane: str) -> bool:
    """Whether somebody else cordoned a machine of which ours was lifted by hand.

    That leaves our annotations. An API server that does not keep who set a field says nothing.
    """
    managers = {
        entry.get("manager")
        for entry in node["metadata"].get("managedFields", ())
        if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return bool(managers) and manager(plane) not in managers
