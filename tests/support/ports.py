"""Ports at which nobody listens."""

from __future__ import annotations

from paceline.node.processes import number_of, reserved_port


def free_port() -> int:
    """A port that was free a moment ago: another program may take it."""
    with reserved_port() as reserved:
        return number_of(reserved)
