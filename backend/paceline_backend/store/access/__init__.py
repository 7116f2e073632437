"""Who may use the control plane: `tokens`.

A token is `pl_<id>_<secret>`. The database has the id and the secret's hash. A browser that was let
in by a link has a row of its own, so that it can be shown and shut out like a token.

Called by `api.auth` for each request, by `api.tokens`, and by `paceline server` for its own token.
"""
