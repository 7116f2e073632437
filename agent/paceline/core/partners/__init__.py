"""Partners with which a rank averages: `pairs` of ranks (AD-PSGD), `groups` (hierarchical RNA)."""
