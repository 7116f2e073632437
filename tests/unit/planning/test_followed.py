"""What rank 0 remembers of an attempt restores the planner's history."""

from __future__ import annotations

import pickle

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline import policies
from paceline.planning.feedback import Window
from paceline.planning.followed import Followed
from paceline.planning.history import History
from paceline.planning.planner import Planner
from paceline.wire import Hello


@given(
    segments=st.integers(0, 40),
    drop_last=st.booleans(),
    leaves=st.integers(0, 12),
    used=st.integers(0, 9),
    sources=st.lists(st.sampled_from(["controller", "local", "coast"]), min_size=41, max_size=41),
)
def test_the_history_is_that_of_who_saw_all_segments(
    segments: int, drop_last: bool, leaves: int, used: int, sources: list[str]
) -> None:
    """Epochs of 5 or 6 steps; the script leaves one epoch early; some samples were used before."""
    sizes = np.linspace(1.0, 5.0, 45).astype("<f8").tobytes()
    already = np.arange(used, dtype="<u4").tobytes()
    hello = Hello(
        *(0, 3, 8, 0, sizes, "samples", drop_last, None, 2, 1.0, "0", "2", "cpu"), used=already
    )
    whole, followed = Planner(History(hello), Window(3, 0)), Followed(hello)
    whole.use(policies.make("chronica"), 2)
    for number in range(segments):
        plan = msgspec.structs.replace(whole.plan(), source=sources[number])
        whole.adopt(plan)
        followed.adopt(plan)
        if number == leaves:
            history = whole.history
            history._begin_epoch(history.epoch + 1)
    restored = pickle.loads(pickle.dumps(followed)).history(hello)
    history = whole.history
    if segments == leaves + 1:
        return  # The early end is known with the next epoch's first segment.
    assert not restored.lost
    assert not restored.anew
    assert restored.must_shuffle(2), "the shuffler's last result is unknown"
    assert (restored.seq, restored.step, restored.epoch) == (
        (history.seq, history.step, history.epoch)
    )
    np.testing.assert_array_equal(restored.used, history.used)
    np.testing.assert_array_equal(restored._holder, history._holder)
    assert restored.memory(2) == history.memory(2)
    assert restored.feedback == history.feedback
    assert [plan.seq for plan in restored.newest] == [plan.seq for plan in history.newest]
