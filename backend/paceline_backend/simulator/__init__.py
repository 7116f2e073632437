"""A virtual cluster: up to 10,000 workers on a virtual clock, planned by the real policies."""

from paceline_backend.simulator._simulation import Ran, Simulation
from paceline_backend.simulator.scenario import Scenario, ScenarioError

__all__ = ["Ran", "Scenario", "ScenarioError", "Simulation"]
