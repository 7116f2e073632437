"""A run on the embedded bus, from rank to database, with users and streams of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import redis

from paceline import wire
from paceline_backend.server.stack import Stack
from support.node import script
from support.waiting import until

SCRIPT = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from paceline import Session
    Path(sys.argv[1]).write_text(os.environ["PACELINE_BUS"] + "\\n" + os.environ["SECRET"])
    dist.init_process_group("gloo")
    data = torch.utils.data.TensorDataset(torch.arange(64.0).unsqueeze(1))
    session = Session(data, global_batch=8)
    model = session.wrap(torch.nn.Linear(1, 1))
    optimizer = torch.optim.SGD(model.parameters(), 1e-6)
    loader = session.loader()
    for epoch in range(2):
        for batch in loader:
            optimizer.zero_grad()
            model(batch[0]).mean().backward()
            optimizer.step()
            time.sleep(0.02)
    dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_a_run_reports_as_itself_and_its_variables_are_nowhere(
    stack: Stack, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    body = {
        "script": script(tmp_path, SCRIPT),
        "args": [str(seen)],
        "nproc": 2,
        "env": {"SECRET": "open-sesame"},
    }
    run = stack.api("POST", "/runs", body)["id"]

    def ended() -> Any:
        shown = stack.api("GET", f"/runs/{run}")
        return shown if shown["ended_at"] else None

    shown = until(ended, "the run to end", 120)
    assert shown["state"] == "finished", shown["message"]
    assert shown["step"] == 15
    bus, secret = seen.read_text().split("\n")
    assert secret == "open-sesame"
    assert f"paceline-run-{run}:" in bus
    for path in (stack.data / "bus").rglob("*"):
        if path.is_file():
            assert b"open-sesame" not in path.read_bytes(), path
    for path in stack.data.glob("paceline.db*"):
        assert b"open-sesame" not in path.read_bytes(), path
    with redis.Redis.from_url(_own_url(stack)) as client:
        assert client.xlen(wire.TELEMETRY) == 0
        assert client.exists(wire.run_telemetry(run)), "its ranks wrote there"
        refused: Any = client.execute_command("ACL", "LOG")
        assert refused == [], "nobody needed more than it may do"


def _own_url(stack: Stack) -> str:
    return str(stack.api("GET", "/version")["bus"])
