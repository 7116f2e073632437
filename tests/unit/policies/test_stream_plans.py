"""What controllers plan for a stream, and which policies cannot."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from paceline import policies
from paceline.planning.feedback import COLUMNS, Window
from paceline.planning.history import History
from paceline.planning.offer import offer
from paceline.policies.streams import plan_stream, problem_of
from paceline.wire import Hello
from paceline_backend.requests.errors import InvalidRequestError, check_stream
from paceline_backend.store import refusals
from support.records import adopted, hello

A_S = np.array([0.01, 0.03])
STREAM: Hello = msgspec.structs.replace(hello(), sizes=b"", stream=True, world=2)


def window(steps: int) -> Window:
    """Feedback of ranks of which one is three times as slow."""
    made, rng = Window(2, 0), np.random.default_rng(0)
    for step in range(steps):
        load = rng.uniform(50, 150, 2)
        columns = dict.fromkeys(COLUMNS, np.zeros(2)) | {
            "samples": np.array([4.0, 4.0]),
            "load": load,
            "compute_s": A_S * load + 0.01,
            "squares": load**2 / 4,
            "longest": load / 3,
            "step_s": np.ones(2),
        }
        made.put_step(step, np.stack([columns[name] for name in COLUMNS], axis=1))
    return made


def test_only_policies_that_speeds_decide_can_plan_a_stream() -> None:
    can = {name for name in policies.names() if problem_of(policies.make(name, {})) is None}
    assert can == {"bsp", "paceline"}
    for parameters in ({"mode": "free"}, {"cost": "padded"}):
        assert "paceline cannot plan a stream" in str(
            problem_of(policies.make("paceline", parameters))
        )
    with pytest.raises(ValueError, match="chronica cannot plan a stream"):
        plan_stream(
            policies.make("chronica", {}),
            History(STREAM).problem(4, 0, shuffle=True),
            window(0).feedback(),
        )
    with pytest.raises(InvalidRequestError, match="rna cannot plan a stream"):
        check_stream("rna", {})
    check_stream("paceline", {})


@pytest.mark.parametrize(("policy", "balances"), [("bsp", False), ("paceline", True)])
def test_a_plan_has_speeds_and_no_samples(policy: str, balances: bool) -> None:
    made = policies.make(policy, {})
    problem = History(STREAM).problem(4, 0, shuffle=True)
    unknown = plan_stream(made, problem, window(0).feedback())
    assert (unknown.paces, unknown.shares) == (None, [])
    plan = plan_stream(made, problem, window(20).feedback())
    assert plan.paces is not None
    assert plan.paces.a == pytest.approx(A_S, rel=0.05)
    assert plan.paces.defect(2) is None
    assert plan.shares == (pytest.approx([0.75, 0.25], rel=0.05) if balances else [])
    assert plan.assignment.counts.tolist() == [[0, 0]] * 4


def test_a_controller_offers_it_and_goes_on_after_gaps() -> None:
    history = History(STREAM)
    made, _ = offer(history, window(20), policies.make("paceline", {}), 0)
    assert made.defect(2) is None
    assert (made.indices, made.shuffled) == (b"", False)
    ran = adopted(3, 6).plan
    history.adopt(ran)
    assert not history.lost
    assert (history.seq, history.step) == (4, ran.first_step + ran.steps)


def test_a_hello_of_a_stream_has_no_sizes() -> None:
    assert refusals.of_hello(STREAM) is None
    assert STREAM.samples is None
    for name, value in (("sizes", b"\0" * 8), ("used", b"\0" * 4)):
        wrong = msgspec.structs.replace(STREAM, **{name: value})
        assert refusals.of_hello(wrong) == f"{name} is not empty, but the data is a stream"
