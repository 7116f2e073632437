"""Keys of nodes and runs, derived from the control plane's secret.

A node's key also depends on a seed, which is replaced each time the node is admitted. The key of a
revoked or deleted node is therefore invalid, although the name of the node stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Keys:
    """Keys and passwords of nodes, runs and webhooks.

    `secret` is the control plane's secret (`store.meta.secret`); `seeds` maps nodes to seeds
    (`store.nodes.seeds`). A node without a seed has never received a key.
    """

    secret: bytes = field(repr=False)
    seeds: Mapping[str, str] = field(repr=False, default_factory=lambda: MappingProxyType({}))

    def of_node(self, node: str) -> bytes:
        """Return the key of a node: for MACs of its commands, and to encrypt data for it."""
        return self._derived(b"node-key", self._seeded(node))

    def of_run(self, run: str) -> bytes:
        """Return the key of a run: for MACs of messages to its leader."""
        return self._derived(b"run-key", run)

    def of_webhook(self, webhook: str) -> bytes:
        """Return the secret of a webhook: for signatures of its deliveries."""
        return self._derived(b"webhook-key", webhook)

    def node_password(self, node: str) -> str:
        """Return the password of the node's user on the bus."""
        return self._derived(b"node-bus", self._seeded(node)).hex()

    def run_password(self, run: str) -> str:
        """Return the password of a run's user of the bus."""
        return self._derived(b"run-bus", run).hex()

    def _seeded(self, node: str) -> str:
        return f"{node}\0{self.seeds.get(node, '')}"

    def _derived(self, purpose: bytes, name: str) -> bytes:
        # `person` makes the keys of different purposes differ; it has at most 16 bytes.
        digest = hashlib.blake2b(name.encode(), digest_size=32, key=self.secret, person=purpose)
        return digest.digest()
