"""The streams of the bus: their names, writers, readers and lengths.

========================  =========================  ===========================================
stream                    writer → reader            messages
========================  =========================  ===========================================
``run_telemetry(run)``    ranks → ingest             `Hello`, `HelloPart`, `StepBatch`,
                                                     `MetricBatch`, `RoundBatch`, `Evaluation`,
                                                     `Adopted`, `Fallback`, `LongPhase`,
                                                     `DataEpoch`
                          `paceline run` → ingest    `RunState`, and what its ranks spooled
``node_telemetry(node)``  agent → ingest             `NodeState`; of the node's runs: `RunState`,
                                                     and what their ranks spooled
``TELEMETRY``             ranks and agents without   all messages of the streams above
                          a session → ingest
``live(run)``             ingest → controller        `Committed`: what planning needs, with
                                                     `RunChanged` for a Hello
                          web, worker → controller   `RunChanged`
``CHANGES``               ingest, web, worker → web, no messages, but ids of runs that changed,
                          worker                     each with its earliest new step. Id "":
                                                     something else than a run may have changed
``control(run)``          controller → leader        `Proposal`
                          web → leader               `StopTraining`
                          web → `paceline run`       `Kill`
                          worker → `paceline run`    `EndRanks`
``commands(node)``        web, worker → agent        `Launch`, `Kill`
                          worker → agent             `JoinRendezvous`, `EndRanks`
                          web → agent                `Ask`, `CheckNode`
``answers(node, id)``     agent → web                `Answer`
========================  =========================  ===========================================

Entries on ``control(run)``, ``commands(node)`` and ``answers(node, id)`` carry a MAC (`codec`).
"""

from __future__ import annotations

import re

TELEMETRY = "paceline:telemetry"
# Consumer group of the processes that read telemetry together.
INGEST_GROUP = "ingest"

CHANGES = "paceline:changes"
# Maximum number of entries of ``CHANGES``. If a web process falls further behind, it queries
# the database about all runs.
CHANGES_LENGTH = 1_000
CONTROL_LENGTH = 64
# Maximum number of entries of a node's commands, in case its agent never comes back.
COMMANDS_LENGTH = 1_000


# A node's name is part of stream names, of names of users on the bus, and of URLs of the API.
_NODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")

_WRITTEN = re.compile(r"paceline:(run|node):(.+):telemetry")


def is_node(name: str) -> bool:
    """Return True if a node may have this name."""
    return _NODE.fullmatch(name) is not None


def run_telemetry(run: str) -> str:
    """Return the stream on which a run's own processes report."""
    return f"paceline:run:{run}:telemetry"


def node_telemetry(node: str) -> str:
    """Return the stream of a node's agent, for reports about itself and about runs of that node."""
    return f"paceline:node:{node}:telemetry"


def writer_of(stream: str) -> tuple[str, str]:
    """Return the kind ("run" or "node") and the name of a stream's only writer.

    Both results are empty if the stream has several writers.
    """
    parts = _WRITTEN.fullmatch(stream)
    return ("", "") if parts is None else (parts[1], parts[2])


def live(run: str) -> str:
    """Return the stream from ingest, web and worker to a run's controller."""
    return f"paceline:run:{run}:live"


def control(run: str) -> str:
    """Return the stream from a run's controller to its leader."""
    return f"paceline:run:{run}:control"


def commands(node: str) -> str:
    """Return the stream of commands to a node's agent."""
    return f"paceline:node:{node}:commands"


def answers(node: str, question: str) -> str:
    """Return the stream of a node's answer to the question with this id.

    The stream exists for a short while. With ``*`` as the id, return the pattern of all streams on
    which the node may answer.
    """
    return f"paceline:node:{node}:answer:{question}"
