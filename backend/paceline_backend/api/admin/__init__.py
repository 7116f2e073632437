"""REST: routes about the control plane itself, which only administrators may change."""
