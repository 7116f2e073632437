"""What telemetry tells: attribution, what-if, report, replay."""
