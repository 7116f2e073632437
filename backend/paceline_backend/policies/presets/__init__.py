"""Presets: the policies that users choose by name.

Each file defines ``preset``, a `policies.base.Preset` with name, summary, source, a class of
parameters and ``make(parameters)``, which returns a `Policy`. Some presets divide the samples among
the ranks. Relaxed presets let ranks run ahead of each other, and use the batches of another preset;
most relaxed presets are in one file, `relaxed`. docs/policies.md describes all presets.

Only `policies.registry` reads this package. It finds each ``preset`` by its entry point in
pyproject.toml, so a new preset needs a file in this package and an entry point in pyproject.toml.
`policies.make` then makes its policy:

    policies.make("rna", {"probes": 3})
"""
