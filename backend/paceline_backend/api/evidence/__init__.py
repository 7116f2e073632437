"""REST: why a run is slow or hangs, and what another policy would change."""
