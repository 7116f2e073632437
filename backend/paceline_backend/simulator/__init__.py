"""A virtual cluster: up to 10,000 workers on a virtual clock, planned by the real policies."""

from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.simulator.simulation import Ran, Simulation

__all__ = ["Ran", "Scenario", "ScenarioError", "Simulation"]
