"""Column definitions of the tables of runs and of a run's workers."""

from __future__ import annotations

from typing import Any

RUNS: list[dict[str, Any]] = [
    {"field": "name", "headerName": "Run", "minWidth": 120, "flex": 2, "cellRenderer": "RunLink"},
    {
        "field": "verdict",
        "headerName": "Verdict",
        "headerTooltip": "Who holds the run up, why, and since when",
        "minWidth": 240,
        "flex": 8,
        "cellRenderer": "RunVerdict",
    },
    {"field": "state", "width": 118, "cellRenderer": "RunState"},
    {
        "field": "step_s",
        "headerName": "Time per step",
        "headerTooltip": "Mean duration of all complete steps",
        "width": 116,
        "type": "rightAligned",
        "valueFormatter": {"function": "paceline.seconds(params.value)"},
    },
    {
        "field": "se",
        "headerName": "SE",
        "headerTooltip": "Straggler effect: (max T − min T) / mean T, mean of all complete steps",
        "width": 84,
        "type": "rightAligned",
        "valueFormatter": {"function": "paceline.ratio(params.value)"},
        "cellClassRules": {
            "warn": "params.value >= 0.1 && params.value < 0.3",
            "bad": "params.value >= 0.3",
        },
    },
    {
        "field": "waste",
        "headerName": "Waste",
        "headerTooltip": "Share of the workers' time spent waiting for the slowest, all steps",
        "width": 96,
        "type": "rightAligned",
        "valueFormatter": {"function": "paceline.percent(params.value)"},
        "cellClassRules": {
            "warn": "params.value >= 0.06 && params.value < 0.2",
            "bad": "params.value >= 0.2",
        },
    },
    {"field": "policy", "minWidth": 84, "flex": 1},
    {
        "field": "tags",
        "headerName": "Tags",
        "headerTooltip": "Short words that people gave to the run: paceline runs tag",
        "minWidth": 84,
        "flex": 1,
        "hide": True,
        "sortable": False,
        "cellRenderer": "RunTags",
    },
    {
        "field": "cost",
        "headerName": "Cost",
        "headerTooltip": "Of the workers' time in all steps so far",
        "width": 110,
        "type": "rightAligned",
        "hide": True,
        "sortable": False,
    },
    {
        "field": "progress",
        "headerName": "Progress",
        "headerTooltip": "Steps done of all steps",
        "width": 112,
        "cellRenderer": "RunProgress",
    },
    {
        "field": "done",
        "headerName": "Done",
        "headerTooltip": "When the run ended, or will end at this pace",
        "width": 140,
    },
]


def _figure(
    field: str, name: str, meaning: str, unit: str, width: int = 86, **options: Any
) -> dict[str, Any]:
    """Return a column of numbers; `unit` is the name of a function in ``format.js``."""
    return {
        "field": field,
        "headerName": name,
        "headerTooltip": meaning,
        "minWidth": width,
        "flex": 1,
        "type": "rightAligned",
        "valueFormatter": {"function": f"paceline.{unit}(params.value)"},
        **options,
    }


WORKERS: list[dict[str, Any]] = [
    {"field": "rank", "headerName": "Rank", "width": 72, "pinned": "left"},
    {
        "field": "why",
        "headerName": "Why",
        "headerTooltip": "Why others wait for this rank; point at it or focus it for more",
        "minWidth": 146,
        "flex": 2,
        "cellRenderer": "WorkerWhy",
        # Tab moves the focus from button to button, like on the rest of the page.
        "suppressKeyboardEvent": {"function": "params.event.key === 'Tab'"},
    },
    _figure("caused", "Causes", "Share of all waiting that is for this rank", "percent"),
    _figure("slowest_share", "Slowest in", "Share of the last steps in which this rank was the "
            "slowest", "percent", 98),
    _figure("compute_s", "Compute", "Forward + backward of a step, without waiting or "
            "communication", "seconds"),
    _figure("ett_s", "ETT", "Estimated training time of a step: what the plan expected", "seconds"),
    _figure("ett_error", "ETT error", "Mean of |ETT − T| / T", "percent", 94),
    _figure("wait_s", "Wait", "Time spent waiting for the others in a step", "seconds"),
    _figure("samples", "Samples", "Of the local batch, per step", "number"),
    _figure("load", "Load", "Sum of the sizes of a step's samples, in the data set's unit",
            "number"),
    _figure("share", "Share", "Of each step's load", "percent", 88),
    _figure("a", "Per unit", "Fitted time per size unit", "seconds"),
    {
        "colId": "device",
        "headerName": "Device",
        "headerTooltip": "What the rank computes on, as it says itself",
        "minWidth": 120,
        "flex": 2,
        "valueGetter": {"function": "paceline.device(params.data.device)"},
    },
    _figure("missing", "Missing", "Records that were sent but never arrived", "integer",
            cellClassRules={"lost": "params.value > 0"}),
]  # fmt: skip
