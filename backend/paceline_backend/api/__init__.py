"""The web process: REST, server-sent events, health and metrics.

The supervisor starts `web.run`, which serves the application that `create_app` builds:

    app = create_app(store, Settings(database, bus))

There is one module per resource, with its routes and the models of its queries and bodies: `runs`
(start, stop, resume) with `run_nodes`, `switching`, `quality` and `engines`; `history`, `compare`,
`details` and `export` (what is stored); `telemetry`, `report` and `live` (what ranks did and do);
`evidence` (why a run is slow) and `forecasts`; `nodes`, `fleet`, `alerts`, `logs`, `audit`,
`tokens` and `admin`; `monitoring` (probes and metrics). Some routes return a dataclass of `insight`
or `requests` unchanged; the descriptions of their fields are in that dataclass.

All routes share the following. Before a route runs, the middleware `auth.Authentication` identifies
the caller and checks whether the caller's role may use the route (`rules`). `middleware`,
`headers` and `idempotency` have the other middleware. Routes get the caller from `identity`, the
store from `state`, shared parameters from `queries`, and the revision of a run that the caller has
seen from `preconditions`. `errors` turns exceptions into problem documents, and `openapi` completes
the OpenAPI document.

Routes read from the store and pass requests to `paceline_backend.requests`. Routes contain no SQL
and never import `control`.
"""
