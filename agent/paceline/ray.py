"""Ray Train with Paceline: a `torch_config` that makes a TorchTrainer's workers ranks of a run.

A script changes one argument, and its training loop makes a `paceline.Session` as usual::

    from paceline.ray import PacelineConfig

    trainer = TorchTrainer(
        train, torch_config=PacelineConfig(), scaling_config=ScalingConfig(num_workers=2)
    )
    trainer.fit()

``paceline run --driver --nproc 2 script.py`` starts the script as a run of the control plane. A
script that is started in another way trains without a control plane. This module needs
``paceline[ray]``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from paceline.core.errors import MissingExtraError
from paceline.train import driving
from paceline.train.session import close_all
from paceline.train.startup import place

try:
    import ray
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import TorchConfigContextManager, _TorchBackend
except ModuleNotFoundError as error:
    raise MissingExtraError("paceline.ray", "ray", error) from error


@dataclass
class PacelineConfig(TorchConfig):  # type: ignore[misc]
    """`TorchConfig` of Ray Train whose workers are ranks of the driver's run.

    Create one for each trainer. Each start of the workers by Ray is an attempt of the run. Sessions
    are closed when the training loop returns or raises an error. If the script is not part of a
    run, the workers train without a control plane.

    The arguments are those of `TorchConfig`. A PacelineError is raised if a launcher runs the
    script as several ranks, because each rank would start all workers.
    """

    variables: dict[str, str] | None = field(
        default_factory=lambda: driving.of_driver(os.environ, "PacelineConfig"),
        init=False,
        # The variables include the run's key.
        repr=False,
        compare=False,
    )
    machine: str = field(default_factory=place, init=False, repr=False, compare=False)

    @property
    def backend_cls(self) -> type[_Backend]:
        """Return the class that prepares the workers."""
        return _Backend

    @property
    def train_func_context(self) -> type[_Closing]:
        """Return the context in which the training loop runs on each worker."""
        return _Closing


class _Closing(TorchConfigContextManager):  # type: ignore[misc]
    """Context that closes sessions: Ray kills workers, so functions of `atexit` are not called."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> Any:
        close_all()
        return super().__exit__(kind, error, traceback)


class _Backend(_TorchBackend):  # type: ignore[misc]
    """Backend that sends environment variables to the workers before their process group exists."""

    def __init__(self) -> None:
        super().__init__()
        # Number of starts of the workers, counted in the process of Ray Train's controller.
        self.starts = 0

    def on_start(self, worker_group: Any, backend_config: PacelineConfig) -> None:
        given = backend_config.variables
        if given is not None:
            ranks = worker_group.execute(driving.whereabouts, backend_config.machine)
            variables = driving.variables_of(given, ranks, self.starts)
            send = worker_group.execute_single_async
            sent = [send(rank, driving.set_variables, own) for rank, own in enumerate(variables)]
            ray.get(sent)
            self.starts += 1
        super().on_start(worker_group, backend_config)
