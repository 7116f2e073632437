"""Analyses of a run's telemetry: slow ranks, forecasts for other policies, and results.

    attribution   `attribute(rows)`: splits waiting time into causes and names the slow ranks
    whatif        `forecast(store, run)`: step time under each preset, and the decision of `auto`
    fitness       `Fitness(conditions).cautions(preset, {})`: warnings before a policy switch
    report        `run_report(store, run)`: figures per preset, compared with the fluid limit
    replay        `replay(store, run)`: recomputes all plans and compares them with the segments

The API, the advisor (`control.advice`) and the command line call these functions. All of them only
read the database. In the whole package, `run_id: str` is a run's public id and `run: int` its
database key. Functions raise `UnknownRunError` if the run does not exist, and `StoreError` if the
database does not answer::

    with Store(database) as store:
        print(run_report(store, "9f2c…")["presets"]["paceline"]["speedup"])
"""
