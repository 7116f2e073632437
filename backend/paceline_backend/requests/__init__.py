"""Requests of users and of `auto`: launch a run, switch its policy, stop it or resume it.

Most functions check the request, and write it and a row of the audit log in one transaction. A
function that also publishes the request on the bus pings the bus first, so that it does not store a
request that it cannot publish. The API and `auto` call these functions; the command line and the
demo use the API.

    me = Requester("me", "operator")
    run = launch(store, bus_url, new, me, start=True)
    switch(store, bus_url, RequestedChange(run, me), "paceline", {})
    stop(store, bus_url, RequestedChange(run, me), "stopped by me")
    resume(store, bus_url, RequestedChange(run, me), Resumption(start=True))
    session = sessions.of_node(store, bus_url, "node-1")

Common parameters: `run` is the run's public id, `by` the user who makes the request, and `change`
contains both, with the revision of the run for which the request is meant. `env` has the values of
the run's environment variables; the database stores only their names.

Common errors: `InvalidRequestError` (a field is wrong), `ConflictError` (the run's or node's state
does not allow it), `RevisionError` (the run has another revision than expected),
`UnknownRunError`, `RunEndedError`, `redis.RedisError` (the bus is unavailable) and `StoreError`
(the database failed). Docstrings list only errors that need an explanation.
"""

from paceline_backend.requests import sessions
from paceline_backend.requests.adopting import adopt
from paceline_backend.requests.enlisting import enlist
from paceline_backend.requests.errors import (
    ConflictError,
    InvalidRequestError,
    check_policy,
    refuse_observed,
)
from paceline_backend.requests.joining import join, leave
from paceline_backend.requests.labels import set_target
from paceline_backend.requests.launch import launch
from paceline_backend.requests.nodes import check_node, cordon, uncordon
from paceline_backend.requests.replacing import NodeReplacement, replace, withdraw
from paceline_backend.requests.resume import Elsewhere, Resumption, resume
from paceline_backend.requests.stop import end_hung, stop
from paceline_backend.requests.switch import switch

__all__ = [
    "ConflictError",
    "Elsewhere",
    "InvalidRequestError",
    "NodeReplacement",
    "Resumption",
    "adopt",
    "check_node",
    "check_policy",
    "cordon",
    "end_hung",
    "enlist",
    "join",
    "launch",
    "leave",
    "refuse_observed",
    "replace",
    "resume",
    "sessions",
    "set_target",
    "stop",
    "switch",
    "uncordon",
    "withdraw",
]
