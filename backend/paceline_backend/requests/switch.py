"""Switch of a run to another policy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

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
    """Record and publish a switch. The new policy plans from the next segment on.

    `unless` is called in the transaction before the switch is written. If it returns True, no
    switch is written, but the writes of `unless` are committed.

    Returns:
        The new row of `switches`, with the run's new `revision`, or None if `unless` returned True.

    Raises:
        ConflictError: the run is only observed, so it has no policy.
        InvalidRequestError: there is no such policy, it does not accept the parameters, or it
            cannot plan a stream.
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
        streams.announce(bus, run)
    return {**row, "revision": revision}
