"""How the ranks of a node and the machine itself are: looked at when the control plane asks.

- `check`: how fast the machine is, measured while nothing trains there;
- `ending`: ends ranks that hold up the others, and keeps their stacks;
- `gpus`: clocks, temperature and errors of NVIDIA GPUs;
- `stacks`: the Python stacks of ranks, also of those that hang.
"""
