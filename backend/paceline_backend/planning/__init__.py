"""From telemetry to the next plan: for controller, simulator, what-if and replay alike."""
