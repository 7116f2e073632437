"""A row of the ledger: what a paper shows, how it is measured here, and why both differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any


class Kind(StrEnum):
    """What a row is of."""

    FIGURE = "figure"
    TABLE = "table"
    CLAIM = "claim"  # of the text, beside its figures and tables


class How(StrEnum):
    """Source of our figures; the value is the page's explanation."""

    VIRTUAL = "simulated: the product's policies and simulator, in virtual time"
    LEARNING = "simulated batches and times, with real gradients of virtual ranks"
    REAL = "real ranks on emulated devices"
    HERE = "measured on this machine"
    EXAMPLE = "a worked example, by the product's own function"
    NONE = "not reproduced"

    @property
    def shows(self) -> str:
        """Label of a chart: how its lines came about, in a few words."""
        if self is How.VIRTUAL:
            return "simulated"
        return "simulated, with real gradients" if self is How.LEARNING else self.value


@dataclass(frozen=True)
class Line:
    """A line of a chart, or a group of bars."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    paper: bool = False  # the paper's numbers, as its text gives them


@dataclass(frozen=True)
class Chart:
    """A picture of a measurement."""

    x: str
    y: str
    lines: Sequence[Line]
    bars: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Measured:
    """What a measurement gave.

    Args:
        values: label → our figure; labels that `Row.paper` has, too, are compared.
        chart: the picture; None: the values say all.
    """

    values: Mapping[str, float]
    chart: Chart | None = None


@dataclass(frozen=True)
class Row:
    """A figure, table or claim of a paper.

    Args:
        id: `paper-fig-n` or `paper-table-n`; what `--only` takes.
        shows: what the paper shows there, in our words.
        how: where our figures come from.
        here: what runs here in the place of the paper's testbed.
        paper: label → the paper's figure, where its text or tables give it as a number.
        fed: labels of `paper` whose figures were inputs here, or were fitted, so that ours equal
            them by construction.
        unit: of both figures.
        why: why the figures differ by more than a tenth; of `How.NONE`, why it is not done.
        measure: `module:function` of this package that gives our figures; empty: nothing runs.
        command: writes the records that `measure` reads, if it reads any.
    """

    id: str
    shows: str
    how: How
    here: str = ""
    paper: Mapping[str, float] = field(default_factory=dict)
    unit: str = ""
    why: str = ""
    measure: str = ""
    command: str = ""
    fed: tuple[str, ...] = ()

    @property
    def script(self) -> str:
        """Path of the file that measures the row; empty if nothing runs."""
        module = self.measure.partition(":")[0]
        return f"benchmarks/figures/{module}.py" if module else ""

    def independent(self, ours: Mapping[str, float]) -> list[str]:
        """Return the labels at which the paper's figure and ours say something about each other.

        Ours is measured, in a simulation or in a training, and does not equal theirs by
        construction.
        """
        if self.how in (How.EXAMPLE, How.NONE):
            return []
        return [label for label in self.paper if label in ours and label not in self.fed]

    @property
    def kind(self) -> Kind:
        """Of what the row is, by its id."""
        if "-fig-" in self.id:
            return Kind.FIGURE
        return Kind.TABLE if "-table-" in self.id else Kind.CLAIM

    def measured(self) -> Measured:
        """Measures our figures. Only this imports what measuring needs."""
        module, _, function = self.measure.partition(":")
        of: Measured = getattr(import_module(f"figures.{module}"), function)()
        return of

    @property
    def runs(self) -> str:
        """Command that measures the row here; empty: there is none."""
        own = f"python benchmarks/ledger.py --only {self.id}" if self.measure else ""
        return " && ".join(filter(None, (self.command, own)))

    @property
    def title(self) -> str:
        """The row's name in its paper."""
        if self.kind is Kind.CLAIM:
            return "Text"
        number = self.id.rpartition("-")[2]
        return f"Fig. {number}" if self.kind is Kind.FIGURE else f"Table {number}"
