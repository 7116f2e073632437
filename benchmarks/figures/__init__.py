"""Ledger of the papers: a row for every figure and table, and its measurement here.

    row          Row, and the result of a measurement
    rows         all rows, in the papers' order, from rows.yaml
    <paper>_runs measurements of a paper's rows, with the product's own policies and simulator
    simulated    virtual training that several measurements share
    learning     real gradients of virtual ranks, for measurements that need learning
    page, plots  docs/ledger.md and its pictures, from the recorded measurements

`benchmarks/ledger.py` is the command.
"""
