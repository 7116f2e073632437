"""Presets: the policies that users choose by name.

Each file but one defines ``preset``, a `policies.parts.Preset`. Relaxed presets let ranks run ahead
of each other, and another preset chooses the ranks' samples; most of them are in the file
`relaxed`, each under its own name.
docs/policies.md describes all presets.

`policies.registry` finds each ``preset`` by its entry point in pyproject.toml, so a new preset
needs a file here and an entry point there. `policies.make` then makes its policy:

    policies.make("rna", {"probes": 3})
"""
