"""A policy from outside: the example package, installed, is found and plans like any other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "policy"

SIMULATE = """
import json
import numpy as np
from paceline.core.emulation import Emulation
from paceline.wire import Hello
from paceline import policies
from paceline_backend.simulator import Simulation

sizes = np.random.default_rng(0).permutation(np.arange(1.0, 257.0))
hello = Hello(attempt=0, world=4, global_batch=16, seed=0, sizes=sizes.astype("<f8").tobytes(),
              loss_mean="samples", drop_last=False, epochs=2, lookahead=2, started_at=0.0,
              paceline="", torch="", device="cpu")
devices = Emulation(a_s=[1e-3, 1e-3, 1e-3, 4e-3], b_s=[0.0] * 4)
simulation = Simulation(hello, devices, policies.make("curriculum", {"disorder": 0.0}))
steps, longest = 0, []
while not simulation.finished:
    ran = simulation.advance()
    steps += ran.plan.steps
    longest += ran.features.longest.max(axis=1).tolist()
    slow = ran.features.load[:, 3].sum() / ran.features.load.sum()
print(json.dumps({"names": policies.names(), "steps": steps, "longest": longest, "slow": slow}))
"""

OFFERED = """
from fastapi.testclient import TestClient
from paceline_backend.api.app import create_app
from paceline_backend.server.settings import Settings
from paceline_backend.store import Store

with Store.open("sqlite:///server.db") as store:
    app = create_app(store, Settings("sqlite:///server.db", "redis://127.0.0.1:1", token="t"))
    headers = {"Authorization": "Bearer t"}
    print(TestClient(app, "http://127.0.0.1").get("/api/v1/policies", headers=headers).text)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that pip installed the example into."""
    target = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, *offline, "--target", target, EXAMPLE], check=True)
    return target


def python(installed: Path, *arguments: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=installed,
        env=environment,
        check=False,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_plans_a_simulation(installed: Path) -> None:
    seen = json.loads(python(installed, "-c", SIMULATE))
    assert "curriculum" in seen["names"]
    epochs = [seen["longest"][:16], seen["longest"][16:]]
    assert all(longest == sorted(longest) for longest in epochs)  # short samples first
    assert seen["steps"] == 32
    assert seen["slow"] == pytest.approx(1 / 13, rel=0.25)  # a quarter as fast as three others


def test_its_own_tests_pass(installed: Path) -> None:
    said = python(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(EXAMPLE))
    assert "5 passed" in said


def test_the_server_offers_it(installed: Path) -> None:
    output = python(installed, "-c", OFFERED).splitlines()[-1]
    offered = {policy["name"]: policy for policy in json.loads(output)}
    assert offered["curriculum"]["source"] == offered["median-rate"]["source"] == "an example"
    assert offered["curriculum"]["parameters"]["disorder"]["default"] == 0.1
