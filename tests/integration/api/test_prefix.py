"""A server that a proxy serves below a path."""

from __future__ import annotations

import re

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import Request

from paceline.core.errors import PacelineError
from paceline_backend.api.runs import own_url
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store
from support.web import serving

PAGE = {"Accept": "text/html"}


def test_redirects_lead_below_the_prefix(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, token="secret-of-a-proxy", path_prefix="/p") as web:
        for path in ("/p/runs/r", "/runs/r"):  # left by the proxy, or taken away
            answer = web.get(path, headers=PAGE)
            assert answer.headers["Location"] == "/p/login?next=%2Fruns%2Fr"
        form = {"token": "secret-of-a-proxy", "next": "/runs/r"}
        entered = web.post("/p/login", data=form)
        assert (entered.status_code, entered.headers["Location"]) == (303, "/p/runs/r")
        assert "; Path=/p;" in entered.headers["Set-Cookie"], "others on the host do not get it"


@pytest.mark.parametrize("prefix", ["", "/p", "/api", "/docs"])
def test_the_page_of_the_api_works_below_the_prefix(
    store: Store, bus_url: str, prefix: str
) -> None:
    with serving(store, bus_url, path_prefix=prefix) as web:
        page = web.get(f"{prefix}/docs")
        assert page.status_code == 200
        addresses = re.findall(r"""(?:href|src)="(/[^"]*)"|url: '(/[^']*)'""", page.text)
        matches = [link or url for link, url in addresses]
        assert len(matches) == 4, "script, style, icon and document"
        for address in matches:
            assert address.startswith(f"{prefix}/")
            assert web.get(address).status_code == 200, address
        document = web.get(f"{prefix}/openapi.json").json()
        assert document.get("servers", [{"url": ""}]) == [{"url": prefix}], "where calls are tried"


def test_ranks_are_given_the_prefix() -> None:
    app = FastAPI()
    app.state.settings = Settings("sqlite://", "redis://localhost", path_prefix="/p")
    scope = {"type": "http", "scheme": "https", "server": ("host", 443), "path": "/api/v1/runs"}
    request = Request({**scope, "headers": [], "query_string": b"", "app": app})
    assert own_url(request) == "https://host/p"


def test_what_only_begins_like_the_prefix_is_no_path_below_it(store: Store, bus_url: str) -> None:
    with serving(store, bus_url, path_prefix="/api") as web:
        assert web.get("/api/api/v1/version").status_code == 200
        assert web.get("/apiary").status_code == httpx.codes.OK  # a page that says so


@pytest.mark.parametrize("prefix", ["paceline", "/paceline/", "/a b", "//"])
def test_a_prefix_that_is_none_is_refused(prefix: str) -> None:
    with pytest.raises(PacelineError, match="--path-prefix"):
        Settings("sqlite://", "redis://localhost", path_prefix=prefix)
