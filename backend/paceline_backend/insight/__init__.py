"""Analyses of a run's telemetry: slow ranks, forecasts for other policies, and results.

    attribution   `attribute(rows)`: splits waiting time into causes and names the slow ranks
    whatif        `forecast(store, run)`: step time under each preset, and the decision of `auto`
    fitness       `Fitness(conditions).cautions(preset, {})`: warnings before a policy switch
    report        `run_report(store, run)`: figures per preset, compared with the fluid limit
    replay        `replay(store, run)`: recomputes plans and compares them with the recorded ones

The API, the advisor (`control.advice`) and the command line call these functions. All of them only
read the database::

    with Store(database) as store:
        print(run_report(store, "9f2c…")["presets"]["paceline"]["speedup"])

A run is given by its public id (`str`) or its database key (`int`). Functions that take a public id
raise `UnknownRunError` if the run does not exist. All functions that read the database raise
`StoreError` if the database does not answer.
"""
