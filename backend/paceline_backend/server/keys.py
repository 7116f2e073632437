"""The keys of nodes and runs: derived from the control plane's secret, so nothing is stored."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Keys:
    """What nodes and runs have to show, and what proves to them who speaks.

    Args:
        secret: of the control plane (`store.meta.secret`).
    """

    secret: bytes = field(repr=False)

    def of_node(self, node: str) -> bytes:
        """The key of a node: for MACs of its commands, and to seal what only it may read."""
        return self._derived(b"node-key", node)

    def of_run(self, run: str) -> bytes:
        """The key of a run: for MACs of what its leader is told."""
        return self._derived(b"run-key", run)

    def of_webhook(self, webhook: str) -> bytes:
        """The secret of a webhook: for the signatures of what it is told."""
        return self._derived(b"webhook-key", webhook)

    def node_password(self, node: str) -> str:
        """The password of a node's user of the bus."""
        return self._derived(b"node-bus", node).hex()

    def run_password(self, run: str) -> str:
        """The password of a run's user of the bus."""
        return self._derived(b"run-bus", run).hex()

    def _derived(self, purpose: bytes, name: str) -> bytes:
        # `person` keeps purposes apart; it holds at most 16 bytes.
        digest = hashlib.blake2b(name.encode(), digest_size=32, key=self.secret, person=purpose)
        return digest.digest()
