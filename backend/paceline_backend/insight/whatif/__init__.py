"""What-if forecasts: the time that steps would take under each preset.

    state       `PlanningState`: current state of a run, read from the database
    measured    `MeasuredSteps`: times of the newest steps
    resampled   `Resampled`: the ranks as emulated devices, from models and measured errors
    simulate    simulates each preset on these devices
    forecast    `forecast(store, run)`: fits, simulates and compares → `Forecast`
    answer      `Forecast`, `PresetForecast`, `Decision`: the result, as stored and sent over REST
    auto        `decide(forecast, …)`: stay, wait, recommend, switch or go back; a pure function
    thresholds  the numbers on which forecasts and decisions depend
    child       `Forecaster`: makes forecasts in a process of low priority

`control.advice`, the route `/runs/{id}/whatif` and ``paceline whatif`` use this package::

    with Forecaster(database) as forecaster:
        best = forecaster.submit(run, steps=64).result().forecasts[0]
"""
