"""The ledger of the papers: a row for each figure and table, a page of what was measured."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FIGURES_AND_TABLES = {
    "chronica": (14, 6),
    "sata": (7, 0),
    "lbb": (7, 3),
    "dynamic-batching": (7, 0),
    "rna": (10, 5),
}


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import ledger

    return ledger


def test_each_figure_and_table_has_a_row(ledger: Any) -> None:
    expected = {
        f"{paper}-{kind}-{number}"
        for paper, counts in FIGURES_AND_TABLES.items()
        for kind, count in zip(("fig", "table"), counts, strict=True)
        for number in range(1, count + 1)
    }
    claims = {"dynamic-batching-asp", "rna-theorems"}
    assert set(ledger.ROWS) == expected | claims


def test_each_row_has_a_command_or_a_reason(ledger: Any) -> None:
    rows = ledger.ROWS.values()
    assert [row.id for row in rows if not row.runs and not row.why] == []
    assert [row.id for row in rows if bool(row.runs) == (row.how.name == "NONE")] == []
    of_papers = [row for row in rows if row.kind.name != "CLAIM"]
    assert sum(bool(row.runs) for row in of_papers) >= 0.9 * len(of_papers)


def test_commands_exist(ledger: Any) -> None:
    """What measures a row, without importing what measuring needs."""
    for row in ledger.ROWS.values():
        if row.command:
            assert (ROOT / row.command.split()[1]).is_file(), row.id
        if row.measure:
            module, _, function = row.measure.partition(":")
            tree = ast.parse((BENCHMARKS / "figures" / f"{module}.py").read_text())
            defined = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
            assert function in defined, row.id


def test_the_list_has_every_row(
    ledger: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ledger.py", "--list"])
    ledger.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ledger.ROWS)


def test_the_page_is_made_of_what_was_measured(ledger: Any) -> None:
    """After a change of rows: `python benchmarks/ledger.py --page`."""
    assert ledger.PAGE.read_text() == ledger.page(ledger.recorded())


def test_each_row_that_runs_was_measured(ledger: Any) -> None:
    record = ledger.recorded()
    assert [row.id for row in ledger.ROWS.values() if row.measure and row.id not in record] == []
    drawn = {path.stem for path in ledger.CHARTS.glob("*.svg")}
    assert drawn == {row for row, of in record.items() if of["chart"]}


def test_differences_above_a_tenth_are_explained(ledger: Any) -> None:
    from figures.page import differs

    record = ledger.recorded()
    unexplained = [
        (row.id, labels)
        for row in ledger.ROWS.values()
        if row.id in record and (labels := differs(row, record[row.id]["values"])) and not row.why
    ]
    assert unexplained == []


def test_what_the_papers_say_is_compared(ledger: Any) -> None:
    """A label that only one side has compares nothing; VGG16's rows say why they have no value."""
    record = ledger.recorded()
    alone = {
        label
        for row in ledger.ROWS.values()
        if row.id in record
        for label in row.paper
        if label not in record[row.id]["values"]
    }
    assert alone == {"VGG16, RNA", "VGG16 (H), RNA-H"}


def test_what_was_fed_in_is_a_number_of_the_papers(ledger: Any) -> None:
    for row in ledger.ROWS.values():
        assert set(row.fed) <= set(row.paper), row.id


def test_each_row_has_one_mark_and_its_reason(ledger: Any) -> None:
    """Each row of the top table: the mark, and why numbers are fed in or are missing."""
    from figures.row import Mark

    record = ledger.recorded()
    lines = {
        line.split("](#")[1].split(")")[0]: line.split(" | ")[3]
        for line in ledger.PAGE.read_text().splitlines()
        if line.startswith("| ") and "](#" in line
    }
    assert set(lines) == set(ledger.ROWS)
    for row in ledger.ROWS.values():
        ours = record.get(row.id, {}).get("values", {})
        shown = lines[row.id]
        assert shown.startswith(row.mark(ours)), row.id
        assert sum(shown.startswith(mark) for mark in Mark) == 1
        assert bool(row.fed) == bool(row.fed_why) == ("fed in: " in shown), row.id
        assert row.fed_why in shown
        missing = row.mark(ours) is Mark.MISSING or bool(set(row.paper) - set(ours))
        assert missing == ("not reproduced: " in shown), row.id
        assert not missing or (row.missing_why or row.why.rstrip(".")) in shown


def test_marks_follow_from_the_figures(ledger: Any) -> None:
    from figures.row import How, Mark, Row

    row = Row(
        "x-fig-1",
        "",
        How.VIRTUAL,
        paper={"a": 1, "b": 2},
        fed=("a",),
        fed_why="it is so",
        missing_why="no such thing",
    )
    assert row.mark({"a": 1, "b": 2}) is Mark.INDEPENDENT
    both = row.marked({"a": 1, "b": 2})
    assert both == "computed independently; 1 of 2 numbers fed in: it is so"
    assert row.marked({"a": 1}) == (
        "fed in: it is so; 1 of 2 numbers not reproduced: no such thing"
    )
    assert row.marked({"c": 1}) == "not reproduced: no such thing"
    bare = Row("x-fig-2", "", How.HERE)
    assert bare.marked({"c": 1}) == "computed independently; the paper's text has no number"
    gone = Row("x-fig-3", "", How.NONE, why="No such device.")
    assert gone.marked({}) == "not reproduced: No such device"


def test_the_headline_counts_only_what_is_measured_and_independent(ledger: Any) -> None:
    """Labels without a number of the paper's, fed numbers, examples and claims do not count."""
    from figures.page import headline
    from figures.row import How, Mark

    record = ledger.recorded()
    rows = [row for row in ledger.ROWS.values() if row.kind.name != "CLAIM"]
    ours = {row.id: record.get(row.id, {}).get("values", {}) for row in rows}
    counted = {row.id: row.compared(ours[row.id]) for row in rows}
    marks = [row.mark(ours[row.id]) for row in rows]
    said = headline(record)
    assert f" {marks.count(Mark.INDEPENDENT)} were computed here independently, " in said
    assert f" in {marks.count(Mark.FED)} all of the paper's numbers were fed in, " in said
    assert f" {marks.count(Mark.MISSING)} are not reproduced." in said
    pairs, numbers = sum(map(bool, counted.values())), sum(map(len, counted.values()))
    assert f" {pairs} have numbers to compare with: {numbers}, " in said
    assert counted["chronica-table-1"] == []  # the DIF is asked for
    assert counted["chronica-fig-9"] == []  # the text has no numbers
    assert "TensorFlow, DIF 0" not in counted["chronica-table-4"]
    assert "TensorFlow, DIF 4" in counted["chronica-table-4"]
    examples = [row.id for row in rows if row.how is How.EXAMPLE]
    assert all(counted[row] == [] for row in examples)


def test_readme_and_page_have_the_same_headline(ledger: Any) -> None:
    from figures.page import headline

    said = headline(ledger.recorded()).strip()
    assert said in ledger.PAGE.read_text()
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_each_row_says_how_it_was_measured(ledger: Any) -> None:
    for row, of in ledger.recorded().items():
        assert of["made"]["script"] == ledger.ROWS[row].script, row
        assert of["made"]["commit"], row
        assert of["made"]["machine"], row


def test_amdahls_law_is_fitted_to_one_level(ledger: Any) -> None:
    """With closed forms for workers of 2, 17 and 20 cores, whose noise makes steps a bit longer."""
    from figures import dynamic_batching_runs as runs

    label = "ResNet-50, gain at H 10"
    row = ledger.ROWS["dynamic-batching-fig-6"]
    serial = runs.fitted_serial()
    assert row.fed == (label,)
    assert runs.gain(10, "ResNet-50", serial) == pytest.approx(row.paper[label], rel=1e-3)
    even, uniform = (serial + (1 - serial) / cores for cores in (13, 2))
    exchange = even * (1 / runs.COMPUTING["ResNet-50"] - 1)
    variable = (19 * serial + 1) / 13
    expected = (uniform + exchange) / (variable + exchange)
    assert expected == pytest.approx(row.paper[label], rel=0.03)
