"""Keys of nodes and runs, derived from the control plane's secret.

A node's key depends on a seed, too, which each admission of the node replaces. So a node that was
revoked or forgotten has no key that counts, although its name stays the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True)
class Keys:
    """What nodes and runs have to show, and what proves to them who speaks.

    Args:
        secret: of the control plane (`store.meta.secret`).
        seeds: of nodes (`store.nodes.seeds`). The key of a node without one is in nobody's hands.
    """

    secret: bytes = field(repr=False)
    seeds: Mapping[str, str] = field(repr=False, default_factory=lambda: MappingProxyType({}))

    def of_node(self, node: str) -> bytes:
        """The key of a node: for MACs of its commands, and to seal what only it may read."""
        return self._derived(b"node-key", self._seeded(node))

    def of_run(self, run: str) -> bytes:
        """The key of a run: for MACs of what its leader is told."""
        return self._derived(b"run-key", run)

    def of_webhook(self, webhook: str) -> bytes:
        """The secret of a webhook: for the signatures of what it is told."""
        return self._derived(b"webhook-key", webhook)

    def node_password(self, node: str) -> str:
        """The password of a node's user of the bus."""
        return self._derived(b"node-bus", self._seeded(node)).hex()

    def run_password(self, run: str) -> str:
        """The password of a run's user of the bus."""
        return self._derived(b"run-bus", run).hex()

    def _seeded(self, node: str) -> str:
        return f"{node}\0{self.seeds.get(node, '')}"

    def _derived(self, purpose: bytes, name: str) -> bytes:
        # `person` keeps purposes apart; it holds at most 16 bytes.
        digest = hashlib.blake2b(name.encode(), digest_size=32, key=self.secret, person=purpose)
        return digest.digest()
