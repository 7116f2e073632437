"""Observes a training script that has no `Session`: `paceline observe -- torchrun … train.py`.

`sitecustomize` in `paceline/site` calls `start.watch` when a process starts. Once the script has
imported torch, `patches` hooks into DistributedDataParallel, FSDP2, DataLoader and optimisers, and
into wandb, TensorBoard and MLflow. The hooks call the process's `Observer`, which makes a
`Recorder` when the script wraps a model. `Timeline` derives steps from the calls, and the recorder
reports them as a session does. A process that wraps no model is not observed.

Hooks read clocks and the shapes of tensors. Hooks change no tensor, draw no random number and add
no collective. Any error in a hook ends observing in that process, and training continues.
"""
