"""Row of the ledger: a paper's result, its measurement here, and why both differ."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from typing import Any


class Kind(StrEnum):
    """Kind of a paper's result: a figure, a table, or a claim in the text without either."""

    FIGURE = "figure"
    TABLE = "table"
    CLAIM = "claim"


class How(StrEnum):
    """Source of the figures here. The value is the page's explanation."""

    VIRTUAL = "simulated: the product's policies and simulator, in virtual time"
    LEARNING = "simulated batches and times, with real gradients of virtual ranks"
    REAL = "real ranks on emulated devices"
    HERE = "measured on this machine"
    EXAMPLE = "a worked example, by the product's own function"
    NONE = "not reproduced"

    @property
    def shows(self) -> str:
        """Label of a chart that states the origin of its lines in a few words."""
        if self is How.VIRTUAL:
            return "simulated"
        return "simulated, with real gradients" if self is How.LEARNING else self.value


@dataclass(frozen=True)
class Line:
    """Line of a chart, or group of bars. With `paper`, it has numbers of the paper's text."""

    name: str
    x: Sequence[Any]
    y: Sequence[float | None]
    paper: bool = False


@dataclass(frozen=True)
class Chart:
    """Chart of a measurement."""

    x: str
    y: str
    lines: Sequence[Line]
    bars: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Measured:
    """Result of a measurement.

    Args:
        values: figures by label. Those whose label is also in `Row.paper` are compared.
        chart: the chart, or None if the values suffice.
    """

    values: Mapping[str, float]
    chart: Chart | None = None


@dataclass(frozen=True)
class Row:
    """Figure, table or claim of a paper.

    Args:
        id: `paper-fig-n` or `paper-table-n`, which `--only` accepts.
        shows: summary of the paper's result.
        how: source of the figures here.
        here: setup that replaces the paper's testbed here.
        paper: the paper's figures by label, if its text or tables give them as numbers.
        fed: labels of `paper` whose figures were inputs here, or were fitted, so that both figures
            are equal by construction.
        unit: unit of both figures.
        why: reason why the figures differ by more than a tenth, or, for `How.NONE`, why the result
            is not reproduced.
        measure: `module:function` of this package that returns the figures here. Empty if nothing
            runs.
        command: command that writes the records which `measure` reads, if any.
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
        """Return the labels whose figures here are independent of the paper's.

        They are measured, in a simulation or in a training, and do not equal the paper's by
        construction.
        """
        if self.how in (How.EXAMPLE, How.NONE):
            return []
        return [label for label in self.paper if label in ours and label not in self.fed]

    @property
    def kind(self) -> Kind:
        """Kind of the result, from the id."""
        if "-fig-" in self.id:
            return Kind.FIGURE
        return Kind.TABLE if "-table-" in self.id else Kind.CLAIM

    def measured(self) -> Measured:
        """Measure the row's figures. Only this method imports modules that measuring needs."""
        module, _, function = self.measure.partition(":")
        of: Measured = getattr(import_module(f"figures.{module}"), function)()
        return of

    @property
    def runs(self) -> str:
        """Command that measures the row here, or an empty string."""
        own = f"python benchmarks/ledger.py --only {self.id}" if self.measure else ""
        return " && ".join(filter(None, (self.command, own)))

    @property
    def title(self) -> str:
        """Name of the row in its paper."""
        if self.kind is Kind.CLAIM:
            return "Text"
        number = self.id.rpartition("-")[2]
        return f"Fig. {number}" if self.kind is Kind.FIGURE else f"Table {number}"
