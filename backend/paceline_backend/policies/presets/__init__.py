"""Presets: the policies that users choose by name.

Each file defines ``preset``, a `policies.base.Preset` with name, summary, source, parameters and
``make(parameters)``, which returns a `Policy`. Presets of batches divide the samples: `bsp`,
`paceline`, `chronica`, `sata`, `lbb`, `boa`, `ep4ddl`, `static-batching`, `dynamic-batching`.
Relaxed presets let ranks run ahead of each other and combine with the batches of another preset:
`rna`, `ssp`, `local-sgd`, … `adaptive` and `rna-hierarchical` choose the synchroniser themselves.

Only `policies.registry` reads this package. It finds each ``preset`` by its entry point in
pyproject.toml. A new preset needs a file here and a line there::

    policies.make("rna", {"probes": 3})
"""
