"""Errors of requests, and checks that raise them. The API maps each class to an HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline import policies
from paceline.core import driver
from paceline.core.errors import PacelineError
from paceline.policies import streams
from paceline.wire import OBSERVED, defects
from paceline_backend import backends
from paceline_backend.store.new_runs import NewRun


class ConflictError(PacelineError):
    """The request conflicts with the current state of the run or of the nodes."""


class InvalidRequestError(PacelineError):
    """A field of the request is wrong.

    `message` describes the error and how to fix it. `detail` is the text of the exception, by
    default field and message. `suggestion` is a valid value that the user may have meant.
    """

    def __init__(
        self, field: str, message: str, detail: str | None = None, suggestion: str | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if detail is None else detail)
        self.field = field
        self.message = message
        self.suggestion = suggestion


def backend_of(name: str) -> backends.Backend:
    """Return the training backend of this name, or raise `InvalidRequestError`."""
    try:
        return backends.get(name)
    except backends.UnknownBackendError as error:
        message = str(error)
        raise InvalidRequestError("backend", message, message) from error


def check_start(policy: str, parameters: Mapping[str, Any], world: int) -> None:
    """Validate the policy of a new run, like `check_policy`, but accept `OBSERVED`, too."""
    if policy != OBSERVED:
        check_policy(policy, parameters, world)
    elif parameters:
        raise InvalidRequestError("parameters", "an observed run has no policy: omit parameters")


def check_driver(new: NewRun) -> None:
    """Raise `InvalidRequestError` for options that a driver does not support.

    A driver is a script that starts the ranks itself.
    """
    if driver.VARIABLE not in new.env:
        return
    because = f"{driver.VARIABLE} is set, so the script starts its ranks itself"
    if new.nodes_max > 1:
        raise InvalidRequestError(
            "nodes_max", f"{because}, on nodes of its choice: keep the number of nodes at 1"
        )
    if new.restart_hung_s is not None:
        raise InvalidRequestError(
            "restart_hung_s", f"{because}, and ends them: omit restart_hung_s"
        )


def refuse_observed(run: str, policy: str) -> None:
    """Raise `ConflictError` if the run is observed, that is, its script divides its batches."""
    if policy == OBSERVED:
        raise ConflictError(
            f"run {run} is observed: its script divides its batches itself, so no policy can "
            "apply; use a paceline.Session in the script, and start it with `paceline run`"
        )


def check_stream(policy: str, parameters: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` if a policy cannot plan a run whose data is a stream.

    Call `check_policy` first.
    """
    if reason := streams.problem_of(policies.make(policy, parameters)):
        raise InvalidRequestError("policy", reason, reason)


def check_policy(
    policy: str, parameters: Mapping[str, Any], world: int, token_budget: float | None = None
) -> None:
    """Validate a policy and its parameters for a run.

    `world` is the run's number of ranks. `token_budget` is the budget of a step in the unit of the
    sizes, or None if the run has no budget or has not reported it yet.

    Raises:
        InvalidRequestError: there is no such policy, it does not accept the parameters, or it
            cannot keep the token budget.
    """
    if reason := defects.of_plain(dict(parameters), "parameters"):
        raise InvalidRequestError("parameters", reason, reason)
    try:
        made = policies.make(policy, parameters, world)
    except policies.UnknownPolicyError as error:
        message = str(error)
        raise InvalidRequestError("policy", message, message, error.suggestion) from error
    except ValueError as error:
        raise InvalidRequestError("parameters", str(error), str(error)) from error
    if reason := policies.unsuited(made, token_budget):
        raise InvalidRequestError("policy", reason)
