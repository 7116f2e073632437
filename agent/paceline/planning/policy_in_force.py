"""Policy with which rank 0 plans, as the script, the user or the control plane has named it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from paceline import policies
from paceline.policies import Policy
from paceline.policies.streams import problem_of

# Variable of a rank's environment: the policy with which the control plane started the run.
FIRST_POLICY = "PACELINE_FIRST_POLICY"
# Not a policy, but the control plane's choice of policies.
_AUTO = "auto"


@dataclass(frozen=True)
class PolicyInForce:
    """A policy's name, its parameters that are not the defaults, and the run's policy version."""

    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    version: int = 0

    @staticmethod
    def of(given: object, what: str) -> PolicyInForce:
        """Return a policy given as its name, or as {name: parameters}.

        Raises:
            ValueError: no such policy is installed, or a parameter is wrong. The message begins
                with `what`, the name of the argument.
            TypeError: `given` is neither of the two.
        """
        name: object = given
        parameters: object = {}
        if isinstance(given, Mapping) and len(given) == 1:
            [(name, parameters)] = given.items()
        if not isinstance(name, str) or not isinstance(parameters, Mapping):
            raise TypeError(f"{what}={given!r}: give the name of a policy, or {{name: parameters}}")
        if name == _AUTO:
            raise ValueError(
                f"{what}={given!r}: only a control plane can choose policies from its forecasts: "
                "name a policy, or start the script with `paceline run` and call `paceline auto`"
            )
        try:
            policies.make(name, parameters)
        except ValueError as error:
            raise ValueError(f"{what}={given!r}: {error}") from None
        return PolicyInForce(name, dict(parameters))

    def made(self, world: int, token_budget: float | None, *, stream: bool) -> Policy:
        """Make the policy for a run of `world` ranks.

        Raises:
            ValueError: the policy is not installed, or cannot plan this run.
        """
        policy = policies.make(self.name, self.parameters, world)
        refused = policies.unsuited(policy, token_budget)
        if stream:
            refused = refused or problem_of(policy)
        if refused is not None:
            raise ValueError(refused)
        return policy

    def refuse(self, world: int, token_budget: float | None, *, stream: bool) -> None:
        """Raise a ValueError that names the policy if rank 0 cannot plan a run with it."""
        try:
            self.made(world, token_budget, stream=stream)
        except ValueError as error:
            raise ValueError(f"policy={self.name!r}: {error}") from None

    @property
    def profiles(self) -> bool:
        """True if the ranks of a run that begins with this policy are profiled before training."""
        try:
            return policies.make(self.name, self.parameters).profiles
        # Only the control plane has this policy.
        except ValueError:
            return False
