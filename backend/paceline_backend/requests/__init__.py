"""What people and `auto` ask of a run: to launch it, to switch its policy, to stop or resume it.

Each request is one function that checks it, writes it to the store, and publishes it on the bus.
The bus is asked first whether it answers, so that no request is left half done. Each request
writes a row of the audit log in its transaction. The API and `auto` call the same functions;
command line and demo go through the API.

    me = Requester("me", "operator")
    run = launch(store, bus_url, new, me, start=True)
    switch(store, bus_url, RequestedChange(run, me), "paceline", {})
    stop(store, bus_url, RequestedChange(run, me), "stopped by me")
    resume(store, bus_url, RequestedChange(run, me), Resumption(start=True))
    session = sessions.of_node(store, bus_url, "node-1")

They raise `InvalidRequestError` (a field is wrong), `ConflictError` (not in the run's present
state), `RevisionError` (somebody was faster), `UnknownRunError`, `RunEndedError`, and
`redis.RedisError` (the bus is away).
"""

from paceline_backend.requests import sessions
from paceline_backend.requests.adopting import adopt
from paceline_backend.requests.checking import check_node
from paceline_backend.requests.cordons import cordon, uncordon
from paceline_backend.requests.elsewhere import Elsewhere
from paceline_backend.requests.enlisting import enlist
from paceline_backend.requests.errors import (
    ConflictError,
    InvalidRequestError,
    check_policy,
    refuse_observed,
)
from paceline_backend.requests.hung import end_hung
from paceline_backend.requests.joining import join, leave
from paceline_backend.requests.labels.target import set_target
from paceline_backend.requests.launch import launch
from paceline_backend.requests.replacing import NodeReplacement, replace, withdraw
from paceline_backend.requests.resume import Resumption, resume
from paceline_backend.requests.stop import stop
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
