"""Limits that keep one client from exhausting the memory of the bus.

The embedded bus starts with these limits, and `docker/compose.yaml` sets the same limits. The
worker checks at its start whether an external bus has these limits. They bound the memory of the
bus that clients use for unfinished commands, unread replies and idle connections. `Guard` in
`floods` limits what is stored on the bus.
"""

from __future__ import annotations

from typing import Any

import redis

# Maximum size of a message that ingest reads. The bus refuses a longer argument of a command.
LARGEST_ARGUMENT = 32 * 2**20  # bytes

# Limits of the bus: names and values as in a configuration file. Ranks send a message at least
# every few seconds, so a client that is idle for ten minutes is no rank, or a rank that can
# reconnect.
LIMITS = {
    "proto-max-bulk-len": f"{LARGEST_ARGUMENT}",
    "client-query-buffer-limit": f"{2 * LARGEST_ARGUMENT}",
    "client-output-buffer-limit": f"normal {512 * 2**20} {128 * 2**20} 60",
    "maxmemory-clients": f"{2**30}",
    "timeout": "600",
}


def missing(client: redis.Redis) -> list[str] | None:
    """Return the limits that a bus lacks or sets far higher; None if it does not allow CONFIG."""
    try:
        shown: Any = client.config_get(*LIMITS)
    except redis.ResponseError:
        # Managed services forbid CONFIG.
        return None
    return [name for name in LIMITS if not _is_limit(name, str(_text(shown, name)))]


def _text(shown: dict[Any, Any], name: str) -> Any:
    value = shown.get(name, shown.get(name.encode(), ""))
    return value.decode() if isinstance(value, bytes) else value


def _is_limit(name: str, value: str) -> bool:
    """Return whether a value is low enough; Redis's defaults (0, 512 MiB or 1 GiB) are not."""
    if name == "client-output-buffer-limit":
        words = value.split()
        hard = words[words.index("normal") + 1] if "normal" in words[:-1] else "0"
        return hard != "0"
    if name == "maxmemory-clients" and value.endswith("%"):
        return value != "0%"
    if not value.isdecimal() or value == "0":
        return False
    return name not in ("proto-max-bulk-len", "client-query-buffer-limit") or (
        int(value) <= 4 * LARGEST_ARGUMENT
    )
