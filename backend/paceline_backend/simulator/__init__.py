"""A virtual cluster: up to 10,000 workers on a virtual clock, planned by the real policies.

A `Scenario` says who computes how fast and what the data looks like. A `Simulation` trains it:
each `advance` plans one segment as a controller would and returns what each rank did, a `Ran`.
`sync` holds the models of synchronisers, and `broadcast` shows a simulation on a server as a run.
Called by `paceline simulate`, by what-if forecasts and by benchmarks.

    simulation = Simulation.of(Scenario.load(Path("scenario.yaml")))
    while not simulation.finished:
        print(simulation.advance().step_s)
"""

from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.simulator.simulation import Ran, Simulation

__all__ = ["Ran", "Scenario", "ScenarioError", "Simulation"]
