"""What each preset would have taken, from what a run measured."""

from paceline_backend.whatif._answer import Current, Decision, Forecast, LeftOut, PresetForecast
from paceline_backend.whatif._forecast import forecast

__all__ = ["Current", "Decision", "Forecast", "LeftOut", "PresetForecast", "forecast"]
