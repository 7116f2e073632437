"""Requests another policy for a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from paceline.wire import SwitchRequested
from paceline_backend.requests import streams
from paceline_backend.requests.errors import check_policy, check_stream, refuse_observed
from paceline_backend.store import Connection, Store, runs, switches
from paceline_backend.store.audit import RequestedChange, record_change


def switch(
    store: Store,
    bus_url: str,
    change: RequestedChange,
    policy: str,
    parameters: Mapping[str, Any],
    *,
    unless: Callable[[Connection], bool] | None = None,
) -> dict[str, Any] | None:
    """Writes and publishes a switch; the policy plans from the next segment on.

    Args:
        store: the database.
        bus_url: ``redis://…``.
        change: the run, and who asks.
        policy: its name.
        parameters: of the policy.
        unless: called in the transaction before the switch is written. If it returns True, nothing
            is requested; what it wrote is kept.

    Returns:
        The new row of `switches`, with the run's new `revision`; None if `unless` said so.

    Raises:
        UnknownRunError: no such run.
        RunEndedError: the run is over.
        ConflictError: the run is observed.
        RevisionError: the run has another revision than expected.
        InvalidRequestError: there is no such policy, it does not take the parameters, or it cannot
            plan a stream.
        redis.RedisError: the bus is away.
        StoreError: or one of its kinds.
    """
    run, by = change.run, change.by
    with streams.answering(bus_url) as bus:
        known = runs.get(store, run)
        refuse_observed(run, known["policy"])
        world = known["world"] or known["nproc"] * known["nodes_max"]
        check_policy(policy, parameters, world, known["token_budget"])
        if known["attempt"] is not None and known["samples"] is None:
            check_stream(policy, parameters)
        with store.write() as connection:
            if unless is not None and unless(connection):
                return None
            details = {"policy": policy, "parameters": dict(parameters), "from": known["policy"]}
            revision = record_change(connection, change, "run.policy", details)
            row = switches.add(connection, run, policy, parameters, by.known_as, by.why)
        made = {**row, "revision": revision}
        message = SwitchRequested(made["version"], policy, made["requested_at"])
        streams.announce(bus, run, message)
    return made
