"""REST, server-sent events, health and metrics: the web process.

`create_app` puts the routers together: `runs` (runs and what may be done to them), `telemetry`,
`evidence` (why), `live` (events), `health`, `metrics`. `auth.Authentication` stands before all of
them; `errors` turns exceptions into problem documents; `models` and `report_models` are the
documents. A value that `insight` or `requests` computes is answered as it is: its dataclass there
describes the fields. Routes read from the store and hand requests to `paceline_backend.requests`:
they hold no SQL and never import `control`. Called by `web.run`, which the supervisor starts.

    app = create_app(store, Settings(database, bus))
"""
