"""Switch, stop, launch: written and published once, for API, `auto` and command line."""
