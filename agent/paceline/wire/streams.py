"""The streams of the bus: what each is called, who writes and reads it, and how long it gets.

========================  =========================  ===========================================
stream                    writer → reader            messages
========================  =========================  ===========================================
``TELEMETRY``             ranks, agents → ingest     `Hello`, `StepBatch`, `RoundBatch`,
                                                     `Adopted`, `Fallback`, `RunState`,
                                                     `NodeState`
``live(run)``             ingest → controllers, web  the same but rounds, once committed
                          web, worker → the same     `SwitchRequested`, `RunChanged`
``control(run)``          controller → leader        `Proposal`
                          web → leader               `StopTraining`
``commands(node)``        web → agent                `Launch`, `Kill`
========================  =========================  ===========================================
"""

from __future__ import annotations

TELEMETRY = "paceline:telemetry"
INGEST_GROUP = "ingest"  # of those that read telemetry together

LIVE_LENGTH = 10_000  # entries: as far as a page may lag behind
CONTROL_LENGTH = 64
COMMANDS_LENGTH = 1_000  # of a node whose agent may never come back


def live(run: str) -> str:
    """The stream of what is committed about a run; bounded, for controllers and open pages."""
    return f"paceline:run:{run}:live"


def control(run: str) -> str:
    """The stream from a run's controller to its leader."""
    return f"paceline:run:{run}:control"


def commands(node: str) -> str:
    """The stream of commands to a node's agent."""
    return f"paceline:node:{node}:commands"
