"""What a run's telemetry says: who is slow, what another policy would bring, what was achieved.

    attribution   `attribute(rows)`: splits the waiting into causes and names the ranks behind them
    whatif        `forecast(store, run)`: the step time under each preset, and what `auto` does
    fitness       `Fitness(conditions).cautions(preset, {})`: what a preset ignores, before a switch
    report        `run_report(store, run)`: figures per preset, beside the fluid limit
    replay        `replay(store, run)`: computes all plans again and compares them

The API, the advisor (`control.advice`) and the command line call these. All of them only read::

    with Store(database) as store:
        print(run_report(store, "9f2c…")["presets"]["paceline"]["speedup"])
"""
