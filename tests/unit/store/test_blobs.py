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
    segment = adopted(0, 0).segment
    world = len(segment.counts[0])
    assert blobs.segment(blobs.pack(segment), None, None) == segment
    assert blobs.segment(blobs.pack(segment), world, None) == segment
    assert blobs.segment(blobs.pack(segment), world + 1, None) is None
    most = int(segment.assignment.samples.max())
    assert blobs.segment(blobs.pack(segment), world, most + 1) == segment
    assert blobs.segment(blobs.pack(segment), world, most) is None
