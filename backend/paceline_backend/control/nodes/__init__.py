"""What the worker does about nodes of runs that train on several.

`Replacements` lets a node leave once the node that replaces it is there, and spares join where
nodes were lost. `Watch` notes which node verdicts name slow, and replaces it where that is allowed.
"""
