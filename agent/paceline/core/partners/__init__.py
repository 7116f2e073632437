"""With whom a rank averages: `pairs` of ranks (AD-PSGD) and `groups` of them (hierarchical RNA)."""
