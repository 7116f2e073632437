"""What a rank tells besides its times.

`metrics` checks what a script reports of its model, `compiling` counts what torch.compile compiles
again, `trial` measures what a device can do where its name does not tell. `session` and `loop` call
them.
"""
