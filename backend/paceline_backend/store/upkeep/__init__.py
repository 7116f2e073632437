"""Maintenance of a whole database.

- `prune`: delete ended runs beyond limits. The worker process does so if the server has limits.
- `administration`: back up, restore and check the database, and replace the server's secret.
"""
