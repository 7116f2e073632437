"""Simulation of a cluster: up to 100,000 workers on a virtual clock, planned by the real policies.

    Scenario         a cluster, its data and its events, read from YAML (`ScenarioError`)
    Simulation       one run of a scenario; `advance` plans and trains the next segment
    TrainedSegment   a segment with the times that its ranks would report
    summary          figures of each policy, also in comparison with the fluid limit
    sync             models of gradient synchronisation
    broadcast        reports a simulation to a control plane, as a run with telemetry

``paceline simulate``, the simulated backend, the what-if forecasts and the benchmarks use this
package:

    simulation = Simulation.of(Scenario.load(Path("scenario.yaml")))
    while not simulation.finished:
        print(simulation.advance().step_s)
"""

from paceline_backend.simulator.scenario import Scenario, ScenarioError
from paceline_backend.simulator.simulation import Simulation, TrainedSegment

__all__ = ["Scenario", "ScenarioError", "Simulation", "TrainedSegment"]
