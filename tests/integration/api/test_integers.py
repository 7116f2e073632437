"""No integer makes the server fail, wherever a request has it."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from paceline_backend.store import Store
from support.records import add_run
from support.web import ANY

NUMBERS = (2**31, 2**63 - 1, 2**63, 10**30, -(2**63) - 1, 10**5_000)


def _inputs(schema: Any, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """All schemas of integers that a client may send, however deep."""
    waiting, seen = [schema], set()
    while waiting:
        node = waiting.pop()
        if isinstance(node, list):
            waiting += node
        elif isinstance(node, dict):
            name = node.get("$ref", "")
            if name and name not in seen:
                seen.add(name)
                waiting.append(known[name.rpartition("/")[2]])
            if node.get("type") == "integer":
                yield node
            waiting += [part for part in node.values() if isinstance(part, dict | list)]


def _operations(client: httpx.Client) -> Iterator[tuple[str, str, dict[str, Any], dict[str, Any]]]:
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation, document["components"]["schemas"]


def test_every_integer_of_a_request_has_bounds(client: httpx.Client) -> None:
    unbounded = []
    for method, path, operation, known in _operations(client):
        sent = [operation.get("parameters", []), operation.get("requestBody", {})]
        for schema in _inputs(sent, known):
            least = schema.get("minimum", schema.get("exclusiveMinimum", -(2**64)))
            most = schema.get("maximum", schema.get("exclusiveMaximum", 2**64))
            if not -(2**63) <= least <= most <= 2**63:
                unbounded.append((method, path, schema))
    assert unbounded == []


@pytest.mark.long
def test_no_integer_of_an_address_is_a_fault_of_the_server(
    client: httpx.Client, store: Store
) -> None:
    add_run(store, "r")
    failed = []
    for method, path, operation, _ in _operations(client):
        if not path.startswith("/api/v1") or path.endswith(("/events", "/stream")):
            continue
        parameters = [p for p in operation.get("parameters", []) if p["in"] in ("path", "query")]
        for changed in parameters:
            for text in _texts(changed["schema"]):
                url, query = path, {}
                for each in parameters:
                    value = "r" if each["name"] == "run" else "1"
                    if each["name"] == changed["name"]:
                        value = text
                    if each["in"] == "path":
                        url = url.replace(f"{{{each['name']}}}", value[:8_000])
                    elif each is changed or each.get("required"):
                        query[each["name"]] = value
                answer = client.request(method, url, params=query, headers=ANY)
                if answer.status_code in (500, 503):
                    failed.append((method, path, changed["name"], text[:40], answer.text))
    assert failed == []


def _texts(schema: dict[str, Any]) -> Iterator[str]:
    """Integers as the forms of parameters have them: alone, in ranges, lists, pairs and cursors."""
    yield from map(_decimal, NUMBERS)
    if '"string"' in json.dumps(schema):
        text = str(2**63)
        yield from (f"{text}-{text}", f"1,{text}", f"r:{text}-{text}", f"r@{text}", f"a={text}")
        for cursor in (text, f"[{text}]", f"[0, {text}]"):
            yield base64.urlsafe_b64encode(cursor.encode()).decode().rstrip("=")


def _decimal(number: int) -> str:
    """As `str`, which refuses more than 4,300 digits."""
    return "1" + "0" * 5_000 if number == 10**5_000 else str(number)
