"""Computes the duration of exchanges among ranks in a simulation."""

from __future__ import annotations

import math

import msgspec

from paceline_backend.simulator.sync import Costs


class Communication(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of the all-reduce: a ring, or a measured time.

    W workers take 2(W−1) · latency_s + 2(W−1)/W · bytes / bandwidth. A ring sends 2(W−1) messages
    one after the other, and no all-reduce can move fewer bytes (Patarasuk and Yuan, "Bandwidth
    optimal all-reduce algorithms for clusters of workstations", J. Parallel Distrib. Comput. 69,
    2009).
    """

    # The latency of one message.
    latency_s: float = 0.0
    # The size of the gradients.
    bytes: float = 0.0
    # The bandwidth of the slowest link.
    bandwidth: float | None = None  # bytes per second
    # A time that is added for any number of workers.
    fixed_s: float = 0.0
    # Time of a relaxed synchroniser's exchange; None: the time of an all-reduce.
    round_s: float | None = None

    def problem(self) -> str | None:
        """Return the first problem, with the field's name; None: there is no problem."""
        for name in ("latency_s", "bytes", "fixed_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                return f"communication.{name}: {value}; give a number ≥ 0"
        if self.round_s is not None and not 0 <= self.round_s < math.inf:
            return f"communication.round_s: {self.round_s}; give a number ≥ 0"
        if self.bandwidth is None and self.bytes:
            return "communication.bandwidth: give bytes per second, or omit communication.bytes"
        if self.bandwidth is not None and not 0 < self.bandwidth < math.inf:
            return f"communication.bandwidth: {self.bandwidth}; give bytes per second above 0"
        return None

    def seconds(self, world: int) -> float:
        """Return the time of one all-reduce among `world` workers."""
        rounds = 2 * (world - 1)
        moved = rounds / world * self.bytes
        return self.fixed_s + rounds * self.latency_s + moved / (self.bandwidth or math.inf)

    def costs(self, world: int) -> Costs:
        """Return the costs of exchanges of relaxed synchronisers among `world` workers.

        Two messages start an exchange: one to the ranks' store and one back.
        """
        call_s, size = 2 * self.latency_s, round(self.bytes)
        if self.round_s is not None:
            return Costs(self.round_s, call_s, size)
        there_s = self.latency_s + self.bytes / (self.bandwidth or math.inf)
        pair_s = self.fixed_s + 2 * there_s
        return Costs(self.seconds(world), call_s, size, pair_s=pair_s, group_s=self.seconds)
