"""Messages that the database stores whole."""

from __future__ import annotations

from paceline.wire import Hello
from paceline_backend.store import blobs
from support.records import adopted, hello


def test_a_blob_reads_back() -> None:
    first = hello()
    assert blobs.unpack(blobs.pack(first), Hello) == first
    assert blobs.unpack(blobs.pack([3, 0, 1]), list[int]) == [3, 0, 1]


def test_a_segment_that_does_not_fit_its_hello_is_left_out() -> None:
    plan = adopted(0, 0).plan
    world = len(plan.counts[0])
    assert blobs.plan(blobs.pack(plan), None, None) == plan
    assert blobs.plan(blobs.pack(plan), world, None) == plan
    assert blobs.plan(blobs.pack(plan), world + 1, None) is None
    most = int(plan.assignment.samples.max())
    assert blobs.plan(blobs.pack(plan), world, most + 1) == plan
    assert blobs.plan(blobs.pack(plan), world, most) is None
