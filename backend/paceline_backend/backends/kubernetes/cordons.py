"""Ownership of cordons on machines, and the patches that set and lift them.

All functions are pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Annotations of a machine: reason of the cordon, and id of the control plane that set it.
REASON = "paceline-cordoned"
PLANE = "paceline-cordoned-by"


def manager(plane: str) -> str:
    """Return a control plane's name in `managedFields`, which records who set a field."""
    return f"paceline-{plane}" if plane else "paceline"


def change(node: Mapping[str, Any], plane: str, reason: str | None) -> dict[str, Any] | None:
    """Return a merge patch that cordons a machine, or None for no change.

    `node` is the machine as the API server returns it. Without a reason, the patch lifts the cordon
    of the control plane whose id is `plane`.
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
    """Return True if another user cordoned the machine after Paceline's cordon was lifted by hand.

    Lifting by hand leaves Paceline's annotations. False if the API server has no managed fields.
    """
    managers = {
        entry.get("manager")
        for entry in node["metadata"].get("managedFields", ())
        if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return bool(managers) and manager(plane) not in managers
