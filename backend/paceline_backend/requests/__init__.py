"""What people and `auto` ask of a run: to launch it, to switch its policy, to stop it.

Each request is one function that checks it, writes it to the store, and publishes it on the bus.
The bus is asked first whether it answers, so that no request is left half done. The API and `auto`
call the same functions; command line and demo go through the API.

    run = launch(store, bus_url, new, by="api", start=True)
    switch(store, bus_url, run, "paceline", {}, by="me")
    stop(store, bus_url, run, "stopped by me")

They raise `InvalidRequestError` (a field is wrong), `ConflictError` (not in the run's present
state), `UnknownRunError`, `RunEndedError`, and `redis.RedisError` (the bus is away).
"""

from paceline_backend.requests.errors import ConflictError, InvalidRequestError
from paceline_backend.requests.launch import launch
from paceline_backend.requests.stop import stop
from paceline_backend.requests.switch import switch

__all__ = ["ConflictError", "InvalidRequestError", "launch", "stop", "switch"]
