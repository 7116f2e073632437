"""The ledger of the papers: a row for every figure and table, and how each is measured here.

    row          Row and what a measurement gives
    rows         all rows, in the papers' order, from rows.yaml
    <paper>_runs the measurements of a paper's rows, by the product's own policies and simulator
    simulated    virtual training that several measurements share
    learning     real gradients of virtual ranks, for what only learning shows
    page, plots  docs/ledger.md and its pictures, from the recorded measurements

`benchmarks/ledger.py` is the command.
"""
