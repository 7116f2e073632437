"""Cases for ranks: what they say of their devices when they meet."""

from __future__ import annotations

from paceline.train import device
from paceline.wire import RankDevice
from support.sessions import network, session


def introduced() -> tuple[list[RankDevice], int]:
    """The devices that rank 0 knows, and how many trials this rank made."""
    trials = 0
    tried = device.flops

    def counted(*arguments: object) -> float | None:
        nonlocal trials
        trials += 1
        return tried(*arguments)  # type: ignore[arg-type]

    device.flops = counted  # type: ignore[assignment]
    try:
        with session(24, {"global_batch": 12}) as run:
            run.wrap(network())
            run.wrap(network())  # as of a GAN
            return run._loop.findings.devices, trials
    finally:
        device.flops = tried
