"""What an operator does with a database as a whole: `prune`, `check`, `backup`, revisions.

The worker prunes by itself where the server was given limits; the rest is `paceline db`.
"""
