"""Maintenance of a whole database: `prune`, `check`, `backup`, `secret`.

The worker process prunes automatically if the server has limits. `paceline db` does the rest.
"""
