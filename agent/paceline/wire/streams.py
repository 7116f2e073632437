"""The streams of the bus: what each is called, who writes and reads it, and how long it gets.

========================  =========================  ===========================================
stream                    writer → reader            messages
========================  =========================  ===========================================
``run_telemetry(run)``    ranks → ingest             `Hello`, `HelloPart`, `StepBatch`,
                                                     `MetricBatch`, `RoundBatch`, `Evaluation`,
                                                     `Adopted`, `Fallback`, `LongPhase`,
                                                     `DataEpoch`
                          `paceline run` → ingest    `RunState`
``node_telemetry(node)``  agent → ingest             `NodeState`; of the node's runs: `RunState`,
                                                     and what their ranks spooled
``TELEMETRY``             ranks and agents without   all of these
                          a session → ingest
``live(run)``             ingest → controller        `Committed`: what a plan rests on;
                                                     `RunChanged` for all parts of a Hello
                          web, worker → controller   `SwitchRequested`, `RunChanged`
``CHANGES``               ingest, web, worker → web  no messages: runs about which something was
                                                     committed, each with its earliest new step
``control(run)``          controller → leader        `Proposal`
                          web → leader               `StopTraining`
                          web → `paceline run`       `Kill`
                          worker → `paceline run`    `EndRanks`
``commands(node)``        web, worker → agent        `Launch`, `Kill`
                          worker → agent             `Meet`, `EndRanks`
                          web → agent                `Ask`, `CheckNode`
``answers(node, id)``     agent → web                `Answer`
========================  =========================  ===========================================

What stands on ``control(run)``, ``commands(node)`` and ``answers(node, id)`` carries a MAC
(`authentic`).
"""

from __future__ import annotations

import re

TELEMETRY = "paceline:telemetry"
INGEST_GROUP = "ingest"  # of those that read telemetry together

CHANGES = "paceline:changes"
CHANGES_LENGTH = 1_000  # entries: a web process that lags behind asks the database about all runs
CONTROL_LENGTH = 64
COMMANDS_LENGTH = 1_000  # of a node whose agent may never come back


# A node's name is part of streams, of users on the bus and of addresses of the API.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_WRITTEN = re.compile(r"paceline:(run|node):(.+):telemetry")


def is_node(name: str) -> bool:
    """Whether a node may have this name."""
    return _NODE.fullmatch(name) is not None


def run_telemetry(run: str) -> str:
    """The stream of what a run's own processes report."""
    return f"paceline:run:{run}:telemetry"


def node_telemetry(node: str) -> str:
    """The stream of what a node's agent reports, about itself and about runs of that node."""
    return f"paceline:node:{node}:telemetry"


def writer_of(stream: str) -> tuple[str, str]:
    """Who alone writes to a stream, "run" or "node", and its name; both empty: not one alone."""
    parts = _WRITTEN.fullmatch(stream)
    return ("", "") if parts is None else (parts[1], parts[2])


def live(run: str) -> str:
    """The stream of what is committed about a run, for its controller."""
    return f"paceline:run:{run}:live"


def control(run: str) -> str:
    """The stream from a run's controller to its leader."""
    return f"paceline:run:{run}:control"


def commands(node: str) -> str:
    """The stream of commands to a node's agent."""
    return f"paceline:node:{node}:commands"


def answers(node: str, question: str) -> str:
    """The stream of a node's answer to a question, by the question's id; there for a short while.

    With ``*`` as the id: the pattern of all that the node may answer on.
    """
    return f"paceline:node:{node}:answer:{question}"
