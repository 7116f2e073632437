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


class Mark(StrEnum):
    """Relation of a row's figures here to the paper's numbers."""

    INDEPENDENT = "computed independently"
    FED = "fed in"
    MISSING = "not reproduced"


class How(StrEnum):
    """Source of the figures here. The value is the page's explanation."""

    VIRTUAL = "simulated: the product's policies and simulator, in virtual time"
    LEARNING = "simulated batches and times, with real gradients of virtual ranks"
    REAL = "real ranks on emulated devices"
    HERE = "measured on this machine"
    EXAMPLE = "a worked example, by the product's own function"
    NONE = "not reproduced"

    @property
    def label(self) -> str:
        """The value's name on the page; a dash if there are no figures here."""
        return "–" if self is How.NONE else self.name.lower()

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
        fed_why: reason why these figures are fed in.
        missing_why: reason why labels of `paper` have no figure here.
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
    fed_why: str = ""
    missing_why: str = ""

    @property
    def script(self) -> str:
        """Path of the file that measures the row; empty if nothing runs."""
        module = self.measure.partition(":")[0]
        return f"benchmarks/figures/{module}.py" if module else ""

    def mark(self, ours: Mapping[str, float]) -> Mark:
        """Return the row's mark, from its figures here by label.

        "Fed in" means that all figures which both sides have were inputs here, or were fitted.
        Figures without a number of the paper's are computed independently.
        """
        both = [label for label in self.paper if label in ours]
        if self.how is How.NONE or (self.paper and not both):
            return Mark.MISSING
        return Mark.FED if both and set(both) <= set(self.fed) else Mark.INDEPENDENT

    def marked(self, ours: Mapping[str, float]) -> str:
        """Return the mark in words: with the numbers that it does not hold for, and the reasons."""
        mark = self.mark(ours)
        if mark is Mark.MISSING:
            return f"{mark}: {self.why if self.how is How.NONE else self.missing_why}".rstrip(".")
        if not self.paper:
            return f"{mark}; the paper's text has no number"
        words = mark.value
        if mark is Mark.FED:
            words += f": {self.fed_why}"
        elif self.fed:
            words += f"; {len(self.fed)} of {len(self.paper)} numbers fed in: {self.fed_why}"
        if missing := set(self.paper) - set(ours):
            number = f"{len(missing)} of {len(self.paper)} numbers"
            words += f"; {number} not reproduced: {self.missing_why}"
        return words

    def compared(self, ours: Mapping[str, float]) -> list[str]:
        """Return the labels whose figures here are evidence: measured, and not fed in.

        A worked example follows from its rule, and is no measurement.
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
