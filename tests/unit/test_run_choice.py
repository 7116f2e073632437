"""What `paceline run` asks of the server for a run on several nodes."""

from __future__ import annotations

from typing import Any

import pytest
from typer.testing import CliRunner

from paceline.cli import app
from paceline.node.starting import several


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        ([], {}),
        (["--spares", "1"], {"spares": 1}),
        (
            ["--spares", "2", "--replace-slow-nodes"],
            {"spares": 2, "replace_slow_nodes": True},
        ),
        (
            [
                *("--backend", "slurm"),
                *("--backend-option", "partition=gpu", "--backend-option", "nodes_each=2"),
            ],
            {"backend": "slurm", "backend_options": {"partition": "gpu", "nodes_each": 2}},
        ),
        (["--policy", "bsp"], {"policy": "bsp"}),
    ],
)
def test_only_what_was_given_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, options: list[str], wanted: dict[str, Any]
) -> None:
    choices: list[dict[str, Any]] = []

    def train(_client: object, _launch: object, nodes: str, choice: dict[str, Any]) -> int:
        choices.append({"nodes": nodes, **choice})
        return 0

    monkeypatch.setattr(several, "train", train)
    place = ["--nodes", "2:3", "--server", "http://127.0.0.1:9", "--token", "t"]
    result = CliRunner().invoke(app, ["run", *place, *options, "train.py"])
    assert (result.exit_code, result.output) == (0, "")
    assert choices == [{"nodes": "2:3", "name": "train", "parameters": {}, **wanted}]
