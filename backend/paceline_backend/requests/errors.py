"""What is wrong with a request; the API answers each kind with its own status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core import driver
from paceline.core.errors import PacelineError
from paceline.wire import OBSERVED, problems
from paceline_backend import backends, policies
from paceline_backend.policies import streams
from paceline_backend.store.new_runs import NewRun


class ConflictError(PacelineError):
    """The request does not fit the present state of the run or of the nodes."""


class InvalidRequestError(PacelineError):
    """A field of the request is wrong.

    Args:
        field: its name.
        message: what is wrong with it, and how to mend it.
        detail: the error's own message; None: field and message.
        suggestion: what may have been meant.
    """

    def __init__(
        self, field: str, message: str, detail: str | None = None, suggestion: str | None = None
    ) -> None:
        super().__init__(f"{field}: {message}" if detail is None else detail)
        self.field = field
        self.message = message
        self.suggestion = suggestion


def backend_of(name: str) -> backends.Backend:
    """The backend of a run.

    Raises:
        InvalidRequestError: there is none of this name.
    """
    try:
        return backends.get(name)
    except backends.UnknownBackendError as error:
        message = str(error)
        raise InvalidRequestError("backend", message, message) from error


def check_start(policy: str, parameters: Mapping[str, Any], world: int) -> None:
    """Refuses what no run could begin with; as `check_policy`, but a run may also be observed.

    Args:
        policy: its name, or `OBSERVED`.
        parameters: of the policy.
        world: ranks of the run.

    Raises:
        InvalidRequestError: there is no such policy, or it does not take the parameters.
    """
    if policy != OBSERVED:
        check_policy(policy, parameters, world)
    elif parameters:
        raise InvalidRequestError("parameters", "nothing plans an observed run: leave them out")


def check_driver(new: NewRun) -> None:
    """Refuses what cannot be done for ranks that the script itself starts.

    Args:
        new: a run that is to start.

    Raises:
        InvalidRequestError: the run is a driver's, and asks for it.
    """
    if driver.VARIABLE not in new.env:
        return
    because = f"{driver.VARIABLE} is set, so the script starts its ranks itself"
    if new.nodes_max > 1:
        raise InvalidRequestError(
            "nodes_max", f"{because}, on whichever nodes: leave the number of nodes at 1"
        )
    if new.restart_hung_s is not None:
        raise InvalidRequestError("restart_hung_s", f"{because}, and ends them: leave it out")


def refuse_observed(run: str, policy: str) -> None:
    """Refuses to plan a run whose script divides its batches itself.

    Args:
        run: its public id.
        policy: of the run.

    Raises:
        ConflictError: it is observed.
    """
    if policy == OBSERVED:
        raise ConflictError(
            f"run {run} is observed: its script divides its batches itself, so no policy can be in "
            "force; give the script a paceline.Session, and start it with `paceline run`"
        )


def check_stream(policy: str, parameters: Mapping[str, Any]) -> None:
    """Refuses a policy that cannot plan a run whose data is a stream.

    Args:
        policy: its name; it takes the parameters.
        parameters: of the policy.

    Raises:
        InvalidRequestError: it cannot.
    """
    if reason := streams.problem_of(policies.make(policy, parameters)):
        raise InvalidRequestError("policy", reason, reason)


def check_policy(
    policy: str, parameters: Mapping[str, Any], world: int, token_budget: float | None = None
) -> None:
    """Refuses a policy that no run could be planned with.

    Args:
        policy: its name.
        parameters: of the policy.
        world: ranks of the run.
        token_budget: of the run's steps; None: there is none, or the run has not said yet.

    Raises:
        InvalidRequestError: there is no such policy, it does not take the parameters, or it keeps
            no token budget.
    """
    if reason := problems.of_plain(dict(parameters), "parameters"):
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
