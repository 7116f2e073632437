"""What adapters to frameworks need: `paceline.accelerate`, `.transformers`, `.lightning`, `.ray`.

A framework has a loop of its own, and counts its epochs and steps itself. `loader.DrivenLoader` is
the loader that such a loop reads. `options` checks what a script gives an adapter, and reads what a
script gave its DataLoader. `driving` is for frameworks that start ranks themselves.
"""
