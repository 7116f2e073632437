"""Management of the nodes of multi-node runs by the worker.

`Replacements` lets a node leave once its replacement has arrived, and lets spares join after nodes
were lost. `Watch` records which node verdicts name as slow, and replaces it if the run allows it.
"""
