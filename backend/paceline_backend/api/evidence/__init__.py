"""Why a run is as fast as it is: who is slow, who hangs, and what another policy would change."""
