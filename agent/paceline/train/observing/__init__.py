"""Observes a training script that has no `Session`: `paceline observe -- torchrun … train.py`.

`sitecustomize` in `paceline/site` calls `start.watch` when a process starts. Once the script has
imported torch, `patches` hooks into DistributedDataParallel, FSDP2, DataLoader and optimisers, and
`losses` into wandb, TensorBoard and MLflow. They tell the process's `Observer` what happens. The
observer makes a `Recorder` when the script wraps a model; `Timeline` makes steps of what happens,
and the recorder reports them as any rank does. Nothing is observed in a process that wraps none.

Hooks look at tensors' shapes and at clocks. They change no tensor, draw no random number, and add
no collective. Any error in them ends observing in that process, and training goes on.
"""
