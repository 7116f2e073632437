"""How many ranks RNA should probe (its Fig. 10): response times of 100 simulated ranks.

A rank's steps take 10 to 50 ms, drawn uniformly. Of each of 20 draws, 100 rounds are counted. The
response time is the time from the end of a round until the next round is called. Ranks compute on
during rounds, as in RNA. "All begin anew" is the response time if all ranks began a step with each
round.

Probes cost messages: RNA's scheduler sends a message to each probed rank and takes the first reply.
A round is charged for probes + 1 messages, one after the other and hidden by nothing, which is the
most that probes can cost. Paceline's ranks all draw the same ranks and need no messages.
"""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from harness import Check, finish, parser

from paceline.wire.synchronisation import convert
from paceline_backend.policies.base import Floats
from paceline_backend.simulator.sync import Costs, Work, make

WORLD, PROBES = 100, (1, 2, 3, 4)
LEAST_S, MOST_S = 0.010, 0.050  # time of a step
ROUNDS, STARTING = 100, 5  # counted rounds, and skipped first rounds: all ranks begin at once
STEPS = 200  # steps of each rank: enough for all counted rounds
PAPER_MS = {1: 28.0, 2: 12.0}  # probes → median in the text of the paper
SHARES = (0.05, 0.25, 0.5, 0.75, 0.95)


def work_s(seed: int) -> Floats:
    """Times of each rank's steps, [S, W]."""
    return np.random.default_rng(seed).uniform(LEAST_S, MOST_S, (STEPS, WORLD))


def respond(probes: int, message_s: float, seeds: int) -> dict[str, Any]:
    """Response times of RNA's rounds, and the mean number of contributors."""
    what = convert("partial", {"probes": probes, "staleness": None, "mean": True})
    costs = Costs(call_s=(probes + 1) * message_s)
    rounds = []
    for seed in range(seeds):
        steps = work_s(seed)
        work = Work(0, steps, np.ones(steps.shape, np.int64), np.zeros_like(steps), costs)
        timeline = make(what, WORLD, seed).run(np.zeros(WORLD), work)
        rounds += timeline.rounds[STARTING : STARTING + ROUNDS]
    return {
        **of([round_.waited_s for round_ in rounds]),
        "contributors": float(np.mean([round_.contributors for round_ in rounds])),
    }


def anew(probes: int, seeds: int) -> dict[str, Any]:
    """Response times if all ranks began a step with each round: the probed ranks' least times."""
    rng = np.random.default_rng(0)
    times = [work_s(seed)[:ROUNDS] for seed in range(seeds)]
    first = [
        step[rng.choice(WORLD, probes, replace=False)].min()
        for step in itertools.chain.from_iterable(times)
    ]
    return of(first)


def of(times_s: Any) -> dict[str, Any]:
    """Median and quantiles of times, in ms."""
    quantiles = (1e3 * np.quantile(times_s, SHARES)).tolist()
    return {"median_ms": quantiles[2], "quantiles_ms": quantiles}


def message() -> float:
    """Seconds from a question to the ranks' store until its answer, on this machine."""
    from torch.distributed import TCPStore

    patience = timedelta(seconds=10)
    server = TCPStore("127.0.0.1", 0, None, True, patience, wait_for_workers=False)
    client = TCPStore("127.0.0.1", server.port, None, False, patience)
    took_s = []
    for number in range(500):
        began = time.perf_counter()
        client.compare_set(f"{number}", "", "go")
        took_s.append(time.perf_counter() - began)
    return float(np.median(took_s))


def breaking_even(seeds: int, few: int, many: int) -> float:
    """How many seconds a message must take so that `many` probes respond no sooner than `few`."""
    low, high = 0.0, MOST_S
    while high - low > 2e-5:
        middle = (low + high) / 2
        few_ms, many_ms = (respond(n, middle, seeds)["median_ms"] for n in (few, many))
        low, high = (middle, high) if many_ms < few_ms else (low, middle)
    return high


def picture(results: dict[str, Any], path: Path) -> None:
    """Draw response times by probes as the paper does, on a page."""
    import plotly.graph_objects as go

    figure = go.Figure()
    for label, rows in results["response"].items():
        quantiles = list(zip(*(row["quantiles_ms"] for row in rows.values()), strict=True))
        low, first, median, third, high = quantiles
        figure.add_box(
            name=label,
            x=list(rows),
            lowerfence=low,
            q1=first,
            median=median,
            q3=third,
            upperfence=high,
        )
    figure.add_scatter(
        x=[str(n) for n in PAPER_MS],
        y=list(PAPER_MS.values()),
        name="RNA, Fig. 10: medians in the text",
        mode="markers",
        marker={"symbol": "diamond", "size": 10, "color": "black"},
    )
    figure.update_layout(
        boxmode="group",
        template="plotly_white",
        width=900,
        height=480,
        xaxis={"title": "probed ranks of 100", "type": "category"},
        yaxis={"title": "response time, ms", "rangemode": "tozero"},
        legend={"orientation": "h", "y": 1.0, "yanchor": "bottom"},
        margin={"t": 60, "r": 10, "b": 50, "l": 60},
    )
    figure.write_html(path, include_plotlyjs=True)


def main() -> None:
    """Runs the benchmark."""
    made = parser(__doc__)
    made.add_argument("--plot", type=Path, help="draw it, as HTML")
    options = made.parse_args()
    seeds = 4 if options.quick else 20
    measured_s = message()
    even_s = breaking_even(min(seeds, 8), 2, 3)
    costs = {
        "messages for nothing": 0.0,
        f"a message {1e3 * measured_s:.3f} ms, as here": measured_s,
        f"a message {1e3 * even_s:.1f} ms": even_s,  # from here on a third probe adds nothing
    }
    response: dict[str, Any] = {
        label: {str(n): respond(n, message_s, seeds) for n in PROBES}
        for label, message_s in costs.items()
    }
    response["all begin anew"] = {str(n): anew(n, seeds) for n in PROBES}
    results = {
        "paper_ms": PAPER_MS,
        "response": response,
        "message_s": measured_s,
        "third_probe_pays_below_s": even_s,
    }
    if options.plot:
        picture(results, options.plot)
    free = response[next(iter(costs))]
    gain = free["1"]["median_ms"] / free["2"]["median_ms"]
    checks = [Check("one probe's median over two's", gain, 1.5, ">=")]
    config = {
        "world": WORLD,
        "step_s": [LEAST_S, MOST_S],
        "rounds": ROUNDS * seeds,
        "messages_a_round": "probes + 1, one after the other",
    }
    finish(options, config, results, checks, table(results))


def table(results: dict[str, Any]) -> str:
    """Medians for people."""
    lines = [f"{'median response, ms; probes':<32}" + "".join(f"{n:>8}" for n in PROBES)]
    for label, rows in results["response"].items():
        cells = "".join(f"{row['median_ms']:>8.1f}" for row in rows.values())
        lines.append(f"{label:<32}{cells}")
    paper = "".join(f"{PAPER_MS.get(n, '-'):>8}" for n in PROBES)
    lines.append(f"{'RNA, Fig. 10 (told in its text)':<32}{paper}")
    free = next(iter(results["response"].values()))
    givers = "".join(f"{row['contributors']:>8.1f}" for row in free.values())
    lines.append(f"{'ranks that gave to a round':<32}{givers}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
