"""The ledger of the papers: a row for every figure and table, and how each is measured here.

    row          Row and what a measurement gives
    rows         all rows, in the papers' order
    <paper>_rows the rows of a paper
    <paper>_runs the measurements of its rows, by the product's own policies and simulator
    virtual      virtual training that several measurements share
    learning     real gradients of virtual ranks, for what only learning shows
    page, plots  docs/ledger.md and its pictures, from the recorded measurements

`benchmarks/ledger.py` is the command.
"""
