"""Choice of the loop's features by a session's options, and the order in which they are called."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from paceline.train.feature import Feature
from paceline.train.features.checkpoints import Checkpoints
from paceline.train.features.gathers import GatherCheck
from paceline.train.features.lost_ranks import RankMonitor
from paceline.train.features.memory import LearnedLimits
from paceline.train.features.reform import Reform
from paceline.train.features.shapes import ShapeWarning
from paceline.train.features.signals import Signals
from paceline.train.features.uneven import MicroBatches, WorkSharing
from paceline.train.nodedata import NodeData
from paceline.train.state import TrainingState
from paceline.train.streams.reader import StreamReader

# Signal handlers are installed before ranks wait for each other, and `RankMonitor` compares the
# ranks before any other collective. Shared batches end before a checkpoint is saved. Checkpoints
# are saved before `Reform` ends the process.
_ORDER: tuple[type[Feature], ...] = (
    Signals,
    RankMonitor,
    LearnedLimits,
    MicroBatches,
    WorkSharing,
    GatherCheck,
    Checkpoints,
    Reform,
    NodeData,
    StreamReader,
    ShapeWarning,
)


def made(state: TrainingState, close: Callable[[], None]) -> Iterator[Feature]:
    """Make the features of a session; `close` is a function that closes the session.

    `Checkpoints` and `Signals` are not made here, because the script declares checkpoints later.
    """
    context, world = state.context, state.startup.world
    if world > 1:
        yield RankMonitor(state)
    if (budget := context.epoch_steps.budget) is not None:
        yield LearnedLimits(state, budget)
    if context.limits.micro_batches:
        yield MicroBatches(state)
    if context.uneven_steps and world > 1:
        yield WorkSharing(state)
    # `GatherCheck` calls a collective to check the script's collectives. It is made after the
    # features that refuse collectives, so that a refused collective is not checked.
    if world > 1:
        yield GatherCheck(state)
    if (path := context.environment.reform) is not None:
        yield Reform(state, path, close)
    if context.data is not None:
        yield context.data
    if context.reader is not None:
        yield context.reader
    if world > 1 and context.terms.shapes.samples == 1:
        yield ShapeWarning(context.terms, world, state.gate.models, context.device)


def in_order(features: Iterable[Feature]) -> list[Feature]:
    """Return the features in the order in which the loop calls them."""
    return sorted(features, key=lambda each: _ORDER.index(type(each)))
