"""`paceline token` and `open`, and how the command line finds its token."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from paceline_backend.server.settings import Settings
from support.command_line import Main
from support.waiting import DEADLINE_S
from support.web import ADMIN


@pytest.fixture
def server(client: httpx.Client) -> httpx.Client:
    return client


def test_tokens_are_made_listed_and_revoked(server: httpx.Client, main: Main) -> None:
    at = ("--server", str(server.base_url))
    code, out, _ = main(
        "token", "create", "nightly", "--scope", "operator", "--expires", "30d", *at
    )
    token = out.strip()
    assert (code, token[:3]) == (0, "pl_")
    code, out, _ = main("runs", *at, "--token", token, "--json")
    assert (code, json.loads(out)["items"]) == (0, [])
    code, _, err = main("token", "list", *at, "--token", token)
    assert (code, "token create NAME --scope admin" in err) == (2, True)
    code, out, _ = main("token", "list", *at)
    assert (code, "nightly" in out, token not in out) == (0, True, True)
    code, out, _ = main("token", "list", *at, "--json")
    (row,) = json.loads(out)
    assert row["expires_at"] - row["created_at"] == pytest.approx(30 * 86400, abs=60)
    code, out, _ = main("token", "revoke", row["id"], *at)
    assert (code, out) == (0, "the token nightly is revoked\n")
    code, _, err = main("runs", *at, "--token", token)
    assert (code, "is revoked" in err) == (3, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("create", "n", "--scope", "viewer", "--expires", "1y"), "30d"),
        (("revoke", "../runs"), "paceline token list"),
        (("revoke", "00000000"), "no token has the id"),
    ],
)
def test_mistakes_are_named(
    server: httpx.Client, main: Main, arguments: tuple[str, ...], says: str
) -> None:
    code, _, err = main("token", *arguments, "--server", str(server.base_url))
    assert (code, says in err) == (2, True)


def test_a_token_for_one_node(server: httpx.Client, main: Main) -> None:
    at = ("--server", str(server.base_url))
    code, out, _ = main("token", "create", "gpu-1", "--scope", "agent", "--node", "gpu-1", *at)
    assert code == 0
    path = "/api/v1/nodes/gpu-{}/session"
    asked = {"Authorization": f"Bearer {out.strip()}"}
    answers = [server.post(path.format(node), headers=asked).status_code for node in (1, 2)]
    assert answers == [200, 403]


def test_a_server_takes_its_token_from_a_file(
    main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file goes before what may be in a variable; its parts get the token, not the file."""
    seen: list[Settings] = []

    def start(settings: Settings, *_: object) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr("paceline_backend.commands.server.start_everything", start)
    file = tmp_path / "token"
    file.touch(0o600)
    file.write_text("of the file\n")
    monkeypatch.setenv("PACELINE_TOKEN", "of the variable")
    monkeypatch.setenv("PACELINE_AGENT_TOKEN", "of agents")
    assert main("server", "--token-file", str(file))[0] == 0
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(file))
    assert main("server")[0] == 0
    monkeypatch.delenv("PACELINE_TOKEN_FILE")
    assert main("server")[0] == 0
    assert [each.token for each in seen] == ["of the file", "of the file", "of the variable"]
    monkeypatch.setenv("PACELINE_VIEWER_TOKEN", "of agents")
    code, _, err = main("server")
    assert (code, "must differ" in err) == (3, True)


def test_open_prints_a_link(server: httpx.Client, main: Main) -> None:
    code, out, _ = main("open", "--server", str(server.base_url))
    assert code == 0
    with httpx.Client(trust_env=False, timeout=DEADLINE_S) as browser:
        assert browser.get(out.strip()).status_code == 303


def test_where_the_token_comes_from(
    server: httpx.Client, main: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file comes first, then what is given, then what the server keeps for its user."""
    at = ("runs", "--server", str(server.base_url))
    assert main(*at)[0] == 0, "what the server keeps"
    file = tmp_path / "token"
    file.write_text(f"{ADMIN}\n")
    file.chmod(0o644)
    assert main(*at, "--token-file", str(file))[0] == 2, "others may read it"
    file.chmod(0o600)
    assert main(*at, "--token", "wrong")[0] == 3
    assert main(*at, "--token", "wrong", "--token-file", str(file))[0] == 0
    monkeypatch.setenv("PACELINE_TOKEN", "wrong")
    code, _, err = main(*at)
    assert (code, "PACELINE_TOKEN" in err) == (3, True)
    monkeypatch.setenv("PACELINE_TOKEN_FILE", str(file))
    assert main(*at)[0] == 0
