"""Alerts: what is wrong now or was, the rules that say when, and who is told by webhook.

`tables` declares the tables. `rows` has the alerts, `rules` what an admin changed of the rules,
`webhooks` who is told, and `deliveries` what each of them is still to be told. A row of `alerts`
exists from the first look that sees its condition. It is an alert once `raised_at` is set.

`control.alerts` and `api.alerts` call these. The rules' defaults and the debouncing are in
`insight.alerts`, which knows nothing of SQL.
"""
