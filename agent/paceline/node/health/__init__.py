"""The health of a node and of its ranks, for the control plane.

- `check`: the machine's speed, measured while nothing trains there;
- `ending`: ends ranks that block others, and saves their stacks in their logs;
- `gpus`: clocks, temperature and errors of NVIDIA GPUs;
- `notice`: a cloud provider's notices that it reclaims the machine;
- `stacks`: the Python stacks of ranks, also of ranks that hang.
"""
