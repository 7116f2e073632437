"""What is wrong with a request; the API answers each kind with its own status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.core.errors import PacelineError
from paceline.wire import problems
from paceline_backend import backends, policies


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


def check_policy(policy: str, parameters: Mapping[str, Any], world: int) -> None:
    """Refuses a policy that no run could be planned with.

    Args:
        policy: its name.
        parameters: of the policy.
        world: ranks of the run.

    Raises:
        InvalidRequestError: there is no such policy, or it does not take the parameters.
    """
    if reason := problems.of_plain(dict(parameters), "parameters"):
        raise InvalidRequestError("parameters", reason, reason)
    try:
        policies.make(policy, parameters, world)
    except policies.UnknownPolicyError as error:
        message = str(error)
        raise InvalidRequestError("policy", message, message, error.suggestion) from error
    except ValueError as error:
        raise InvalidRequestError("parameters", str(error), str(error)) from error
