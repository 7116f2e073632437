"""The state of a node's ranks and of the machine, measured for the control plane.

- `check`: the machine's speed, measured while nothing trains there;
- `ending`: ends ranks that block the others, and saves their stacks;
- `gpus`: clocks, temperature and errors of NVIDIA GPUs;
- `notice`: a cloud provider's notices that it reclaims the machine;
- `stacks`: the Python stacks of ranks, also of those that hang.
"""
