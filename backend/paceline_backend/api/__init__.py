"""The web process: REST, server-sent events, health and metrics.

The supervisor starts `web.run`, which serves the application that `create_app` builds:

    app = create_app(store, Settings(database, bus))

`create_app` includes one router per module: `runs` (runs and requests about them), `telemetry`,
`evidence` (why a run is slow), `live` (event streams), `health`, `metrics` and others. The
middleware `auth.Authentication` checks every request before a route runs. `errors` turns
exceptions into problem documents. `models` and `report_models` describe request and response
bodies; a value that `insight` or `requests` computes is returned as it is, and its dataclass there
describes the fields.

Routes read from the store and pass requests to `paceline_backend.requests`. They contain no SQL
and never import `control`.
"""
