"""Maintenance of a whole database.

- `prune`: delete ended runs that exceed limits of age, number or bytes. The worker process calls it
  if the server has such limits.
- `administration`: back up, restore and check the database, and replace the server's secret.
"""
