"""Parts shared by the adapters `paceline.accelerate`, `.transformers`, `.lightning` and `.ray`.

A framework has a training loop of its own, and counts its epochs and steps itself.
`loader.DrivenLoader` is the loader that this loop reads. `options` checks the options that a script
gives to an adapter, and reads the options of the script's DataLoader. `driving` is for frameworks
that start ranks themselves.
"""
