"""Alerts, the rules that raise them, and the webhooks that are notified.

`rows` reads and writes alerts, `rules` the changes that an admin made to rules, and `webhooks` the
receivers and the notifications that are still to be sent. A row of `alerts` exists from the first
evaluation that finds its condition true. The row counts as an alert once `raised_at` is set.

The rules' defaults and the debouncing are in `insight.alerts`, which does not access the database.
"""
