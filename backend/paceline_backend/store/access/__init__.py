"""Access tokens of the control plane, and the browsers that log in with them (module `tokens`).

A token is `pl_<id>_<secret>`. The database stores the id and a hash of the secret. A browser that
logs in has a row of its own, so that an operator can list and revoke it like a token.

`api.auth` calls this package for each request, `api.tokens` to manage tokens, and `paceline server`
for its own token.
"""
