"""Which devices rounds cannot be reduced on, and what of a gradient is reduced there."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from paceline.train.device import Device
from paceline.train.refusals import refuse_devices, refuse_second_device
from paceline.train.sync.gradients import Flat

GPUS = [("cuda", "GPU-1"), ("cuda", "GPU-2"), ("cuda", "GPU-1")]


@pytest.fixture(autouse=True)
def nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)


def test_each_rank_has_a_gpu_of_its_own() -> None:
    refuse_devices(GPUS[:2])
    with pytest.raises(ValueError, match=r"ranks 0 and 2 share a device.*LOCAL_RANK"):
        refuse_devices(GPUS)


def test_mixed_devices_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rank 1's model is on a device of the kind cpu"):
        refuse_devices([GPUS[0], ("cpu", "cpu of process 7")])


def test_a_torch_without_nccl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match="this torch has no NCCL"):
        refuse_devices(GPUS[:2])


def test_parameters_on_two_devices_are_refused() -> None:
    here, there = nn.Linear(1, 1), nn.Linear(1, 1, device="meta")
    refuse_second_device([here, nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="parameters on cpu and meta"):
        refuse_second_device([here, there])


def test_a_gpu_is_known_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its number is the process's own, as under CUDA_VISIBLE_DEVICES."""
    properties = type("Properties", (), {"uuid": "b0b"})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    device = Device(None, 0, 2)
    assert device.unit()[0] == "cpu"
    device.use(torch.device("cuda", 0))
    assert device.unit() == ("cuda", "b0b")


def test_a_gradient_stays_on_its_device_and_the_rest_is_on_the_host() -> None:
    """Applied, both together are what one vector is."""
    matrix = nn.Parameter(torch.ones(2, 3))
    frozen = nn.Parameter(torch.ones(4))
    optimiser = torch.optim.SGD([matrix, frozen], 0.1, momentum=0.5)
    apart, whole = (
        Flat([matrix, frozen], optimiser, device) for device in (torch.device("cpu"), None)
    )
    matrix.grad = torch.arange(6.0).view(2, 3)
    gradient, vector = (flat.read(optimiser, 0.5, 0.25, 1) for flat in (apart, whole))
    assert gradient.on_device is not None and gradient.arrive is not None
    assert gradient.arrive() == 0.0
    assert [len(gradient.vector), len(gradient.on_device)] == [apart.length, apart.on_device]
    assert apart.on_device == 10 and whole.on_device == 0
    assert torch.equal(torch.cat([gradient.on_device, gradient.vector]), vector.vector)
    matrix.grad.zero_()  # the gradient is a copy
    for flat, parts in ((apart, (gradient.vector, gradient.on_device)), (whole, (vector.vector,))):
        with flat.applying(optimiser, *parts):
            assert matrix.grad.tolist() == [[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]]
            assert frozen.grad is None
            assert optimiser.param_groups[0]["lr"] == pytest.approx(0.025)
