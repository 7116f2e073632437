"""Maintenance of a whole database.

- `prune`: delete ended runs that exceed limits of age, number or bytes.
- `administration`: back up, restore and check the database, and replace the server's secret.
"""
