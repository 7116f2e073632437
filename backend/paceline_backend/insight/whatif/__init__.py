"""What-if forecasts: the time that steps would take under each preset.

    state       `PlanningState`: current state of a run, read from the database
    measured    `MeasuredSteps`: times of the newest steps
    resampled   `Resampled`: emulated devices with the models and the measured errors of the ranks
    simulate    simulates each preset on these emulated devices
    forecast    `forecast(store, run)`: fits models, simulates, and returns a `Forecast`
    answer      `Forecast`, `PresetForecast`, `Decision`: the result, as stored and sent over REST
    auto        `decide(forecast, …)`: stay, wait, recommend, switch or go back; a pure function
    thresholds  thresholds of forecasts and decisions
    child       `Forecaster`: makes forecasts in a process of low priority

`control.advice`, the route `/runs/{id}/whatif` and ``paceline whatif`` use this package::

    with Forecaster(database) as forecaster:
        best = forecaster.submit(run, steps=64).result().forecasts[0]
"""
