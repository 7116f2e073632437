"""Tables, declared once for SQLite and Postgres. The migrations must create exactly these tables.

The order of the tables is: control plane, nodes, runs and their launches, telemetry of ranks, sums
of telemetry, findings about runs, alerts. If a table's column `run` is a foreign key, its rows are
deleted together with the run. If `run` is a public id, the rows outlive the run.

A column without a comment has the meaning of the message field or REST field of the same name.
Times are Unix times in seconds. Columns with the suffix `_s` are durations in seconds.
"""

from __future__ import annotations

from collections.abc import Iterator

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    TypeDecorator,
    false,
    text,
)
from sqlalchemy import Text as AnyText
from sqlalchemy.engine import Dialect

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(column_0_label)s",
        "uq": "uq_%(table_name)s_%(column_0_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)


class Text(TypeDecorator[str]):
    """Text column that accepts any string: NUL, which Postgres rejects, is stored as U+FFFD."""

    impl = AnyText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Return the value to store."""
        return None if value is None else value.replace("\0", "\N{REPLACEMENT CHARACTER}")


# Type of keys that the database generates. SQLite generates only keys of type INTEGER.
BigKey = BigInteger().with_variant(Integer, "sqlite")

# Facts and settings of the control plane as a whole, such as its "id" and changed alert rules.
meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

# Access tokens, and a row for each browser that is logged in. Only hashes of secrets are stored.
tokens = Table(
    "tokens",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("id", Text, nullable=False, unique=True),
    # `token` or `browser`.
    Column("kind", Text, nullable=False),
    Column("name", Text, nullable=False),
    # One of viewer, operator, agent, admin.
    Column("scope", Text, nullable=False),
    # SHA-256 of the secret, in hexadecimal.
    Column("hash", Text, nullable=False),
    # For a browser: the id of the token that it logged in with.
    Column("parent", Text),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    # Time of the last use. The login of a browser counts as a use.
    Column("used_at", Double),
    # For an agent's token: the only node that may use it.
    Column("node", Text),
    # For a browser that logged in with a link: the browser that requested the link. NULL: a token
    # requested the link, or the browser logged in with a token.
    Column("via", Text),
    # For an agent's token: the only run whose nodes may use it.
    Column("run", Text),
)

# Requests with an Idempotency-Key.
repeats = Table(
    "repeats",
    metadata,
    # Digest of the key and its requester.
    Column("id", Text, primary_key=True),
    # Digest of the whole request.
    Column("request", Text, nullable=False),
    Column("at", Double, nullable=False),
    # The encrypted response. NULL: the request is being executed, or its result is unknown.
    Column("answer", LargeBinary),
    Index("ix_repeats_at", "at"),
)

# The audit log of changes.
audit = Table(
    "audit",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    # Scope of the requester's token. Empty if the control plane itself made the change.
    Column("scope", Text, nullable=False),
    # Network address of the client.
    Column("address", Text, nullable=False),
    # Name of the client program, as it reports itself.
    Column("via", Text, nullable=False),
    # Kind of change, such as run.policy or token.create.
    Column("action", Text, nullable=False),
    Column("run", Text),
    # The run's revision after the change.
    Column("revision", BigInteger),
    # The changed object if it is not a run, such as a token.
    Column("target", Text, nullable=False),
    Column("why", Text, nullable=False),
    Column("details", JSON, nullable=False),
    Index("ix_audit_run_key", "run", "key"),
)

# Leases of worker processes, see `store.leases`. Only the owner of an unexpired lease may do the
# work that the lease is for.
leases = Table(
    "leases",
    metadata,
    # One of plan, jobs, alerts, fleet.
    Column("purpose", Text, primary_key=True),
    # Key of the run. 0: the lease is on all runs. Because of the 0, this is not a foreign key.
    Column("run", BigInteger, primary_key=True, autoincrement=False),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
    sqlite_with_rowid=False,
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("registered_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
    Column("left", Boolean, nullable=False),
    # The machine and its runs, from the last heartbeat: {"hostname", "cores", "memory_bytes",
    # "gpus", "paceline", "runs", "gpu_states"}.
    Column("report", JSON, nullable=False),
    # Speeds of the node and the time `at` (by the node's clock) when its agent measured them. NULL:
    # unknown.
    Column("check", JSON(none_as_null=True)),
    # Whether the agent has a session. If so, it accepts only messages with a MAC, and can decrypt
    # the secrets in orders to launch a run.
    Column("signed", Boolean, nullable=False, server_default=false()),
    # The only run that the agent may serve, because its token belongs to this run. NULL: any run.
    Column("only_run", Text),
    # The engine that provides the node, and the engine's name of the machine. NULL: no engine, or
    # unknown.
    Column("backend", Text),
    Column("host", Text),
    # The token that the agent's session was created with. The session ends when the token ends.
    # NULL: the agent has no session, or a proxy authenticated it.
    Column("token", Text),
    # Random. The node's key and its password on the bus are derived from it. NULL: no session.
    Column("seed", Text),
)

# Cordons of nodes. While `lifted_at` is NULL, the node is cordoned.
cordons = Table(
    "cordons",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("node", Text, nullable=False),
    Column("at", Double, nullable=False),
    Column("by", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("lifted_at", Double),
    Column("lifted_by", Text),
    Column("lifted_why", Text),
    # For a node that an engine provides: the engine, and the engine's name of the machine.
    # `told_at` is the time when the engine accepted the cordon or, if the cordon is lifted, its
    # end. `refusal` is the engine's error if it refused. If both are NULL, the cordon or its end
    # must still be sent to the engine.
    Column("backend", Text),
    Column("host", Text),
    Column("told_at", Double),
    Column("refusal", Text),
    Index("ix_cordons_node_key", "node", "key"),
    # Unique, so that two concurrent requests cannot cordon the same node twice.
    Index(
        "uq_cordons_present",
        "node",
        unique=True,
        sqlite_where=text("lifted_at IS NULL"),
        postgresql_where=text("lifted_at IS NULL"),
    ),
)

# Engines that may have jobs of a run. A row exists from the launch until the engine has no more
# jobs of the run.
engine_runs = Table(
    "engine_runs",
    metadata,
    Column("backend", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    sqlite_with_rowid=False,
)

runs = Table(
    "runs",
    metadata,
    Column("key", BigKey, primary_key=True),
    # The public id, in URLs and on the bus.
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    # See `wire.states.State`.
    Column("state", Text, nullable=False),
    # One of local, simulated, slurm, …
    Column("backend", Text, nullable=False),
    # The node that launches the run; for several nodes, the one that serves the rendezvous. NULL
    # until it is chosen.
    Column("node", Text),
    Column("script", Text, nullable=False),
    Column("args", JSON, nullable=False),
    # Names of environment variables; values are not stored, because they can be secrets.
    Column("env", JSON, nullable=False),
    Column("cwd", Text),
    # Number of ranks on each node.
    Column("nproc", Integer, nullable=False),
    Column("max_restarts", Integer, nullable=False),
    # The policy that was requested last. It may not be in force yet.
    Column("policy", Text, nullable=False),
    # Policy version: increases by 1 with each switch.
    Column("version", Integer, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    # When a message of the run was last stored, by the clock of the process that stored it.
    Column("seen_at", Double),
    # Whether the run was ended only because no messages of it arrived. A later message makes the
    # run active again.
    Column("lost", Boolean),
    Column("exit_code", Integer),
    Column("message", Text),
    # Number of telemetry records that were lost because a spool was full.
    Column("dropped", BigInteger, nullable=False),
    # This and the next three columns come from the leader's Hello. NULL until the Hello arrives.
    Column("attempt", Integer),
    Column("world", Integer),
    Column("samples", BigInteger),
    # Weights of ranks in the mean loss: "samples", "size" or "ranks".
    Column("loss_mean", Text),
    # Digest of the latest attempt's Hello, see `hello_parts`.
    Column("hello", LargeBinary),
    # Increases by 1 with each requested change.
    Column("revision", BigInteger, nullable=False, server_default="0"),
    # First attempt of the latest launch. Messages of earlier launches do not change the run's
    # state.
    Column("first_attempt", Integer, nullable=False, server_default="0"),
    # One more than the highest known attempt number.
    Column("attempts", Integer, nullable=False, server_default="0"),
    # Time since which the run is hidden and its rows are being deleted. NULL: it is kept.
    Column("pruned_at", Double),
    # Whether the run has its own user and stream on the bus, so that no other client can send
    # messages of the run.
    Column("signed", Boolean, nullable=False, server_default=false()),
    Column("nodes_min", Integer, nullable=False, server_default="1"),
    Column("nodes_max", Integer, nullable=False, server_default="1"),
    # For a multi-node run: phase of its launchers' rendezvous, see `wire.states.Rendezvous`.
    Column("rendezvous", Text, nullable=False, server_default="waiting"),
    # Address of the rendezvous, "address:port". NULL unless the phase is `ready`.
    Column("rendezvous_address", Text),
    # Number of nodes that are held back as spares while the run trains, and whether a node that a
    # verdict names slow is replaced by one of them automatically.
    Column("spares", Integer, nullable=False, server_default="0"),
    Column("replace_slow_nodes", Boolean, nullable=False, server_default=false()),
    # Options for the run's backend, such as a Slurm partition.
    Column("backend_options", JSON(none_as_null=True)),
    # For a run on an engine: {"launch": n, "jobs": {part: the engine's name of the job, or null}}
    # and further keys, see `store.jobs`.
    Column("backend_jobs", JSON(none_as_null=True)),
    # The ranks are restarted after hanging for this many seconds. NULL: never.
    Column("restart_hung_s", Double),
    # The latest attempt that the control plane ended because the run was hanging.
    Column("hang_ended", Integer),
    # A node can join only if the median speed of the run's nodes is at most this many times its
    # speed. 0: any node can join.
    Column("join_check", Double, nullable=False, server_default="1.5"),
    # The ranks' device, from the leader's Hello.
    Column("device", Text),
    Column("note", Text, nullable=False, server_default=""),
    # When the run's rows of `run_days` were last recomputed, by the clock of the process that did
    # it.
    Column("summed_at", Double),
    # The operator's target for the model: {"metric", "value", "direction"}. NULL: none.
    Column("target", JSON(none_as_null=True)),
    # The nodes that are held back for the run, until it uses them or has ended. NULL: none.
    Column("spare_nodes", JSON(none_as_null=True)),
    # What an operator allows `auto` to do: {"mode", "relaxed", "requested_at", "requested_by"}.
    # NULL: nothing.
    Column("auto", JSON(none_as_null=True)),
    # From this step on, roll-ups of blocks may be missing, see `rollups.writing.fill`. NULL: none
    # is missing.
    Column("rollups_due", BigInteger),
    # The scenario of a simulated run. NULL: the run is not simulated.
    Column("scenario", JSON(none_as_null=True)),
    Index("ix_runs_state", "state"),
    Index(
        "ix_runs_rollups_due",
        "key",
        sqlite_where=text("rollups_due IS NOT NULL"),
        postgresql_where=text("rollups_due IS NOT NULL"),
    ),
)

run_tags = Table(
    "run_tags",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("tag", Text, primary_key=True),
    Index("ix_run_tags_tag", "tag"),
    sqlite_with_rowid=False,
)

# One row per node on which the control plane launched a multi-node run.
run_nodes = Table(
    "run_nodes",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("node", Text, primary_key=True),
    # First attempt of the node's latest launch.
    Column("first_attempt", Integer, nullable=False),
    # State of the run on this node, as in `runs.state`.
    Column("state", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("exit_code", Integer),
    Column("message", Text),
    # Address at which the node could serve the rendezvous. NULL until the node reports it.
    Column("address", Text),
    Column("port", Integer),
    Column("launched_at", Double, nullable=False),
    # Time of the node's last report, by the node's clock.
    Column("reported_at", Double),
    # Whether the node was sent the address of the rendezvous.
    Column("met", Boolean, nullable=False),
    # Whether the node is assumed lost because its agent sends no heartbeats. A later report of the
    # node sets this to false.
    Column("lost", Boolean, nullable=False),
    # Whether the node was ordered to leave the run.
    Column("leaving", Boolean, nullable=False),
    # The slow or lost node that this node replaces.
    Column("replaces", Text),
    # Whether the node's launcher has reached the rendezvous, so that the replaced node may leave.
    Column("arrived", Boolean, nullable=False, server_default=false()),
    sqlite_with_rowid=False,
)

# One row per Hello.
attempts = Table(
    "attempts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("started_at", Double, nullable=False),
    # First step of the attempt.
    Column("step", BigInteger, nullable=False),
    # One past the last step that earlier attempts had reached at the time of the Hello.
    Column("reached", BigInteger, nullable=False),
    # Each rank's node. NULL: unknown.
    Column("placement", JSON(none_as_null=True)),
    # Each rank's `wire.RankDevice`. NULL: unknown.
    Column("devices", JSON(none_as_null=True)),
    sqlite_with_rowid=False,
)

# The latest Hello of each run as MessagePack, and parts of Hellos that are still arriving.
hello_parts = Table(
    "hello_parts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    # Digest of the whole Hello.
    Column("hello", LargeBinary, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

switches = Table(
    "switches",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # 0: the policy at the start.
    Column("version", Integer, primary_key=True),
    Column("policy", Text, nullable=False),
    Column("parameters", JSON, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("requested_by", Text, nullable=False),
    # First step that was planned with the policy.
    Column("effective_step", BigInteger),
    Column("effective_at", Double),
    Column("why", Text, nullable=False, server_default=""),
)

# One row per rank and step. Queries read ranges of the primary key.
worker_steps = Table(
    "worker_steps",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("seq", BigInteger, nullable=False),
    Column("epoch", Integer, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("load", Double, nullable=False),
    Column("data_s", Double, nullable=False),
    Column("compute_s", Double, nullable=False),
    Column("sync_s", Double, nullable=False),
    Column("step_s", Double, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("ett_s", Double),
    Column("loss", Double),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("squares", Double, nullable=False, server_default="0"),
    Column("longest", Double, nullable=False, server_default="0"),
    Column("recompiles", Integer, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

# One row per step that all ranks reported: sums from which SE, step DIF and waste are computed.
steps = Table(
    "steps",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("segment", BigInteger, nullable=False),
    Column("workers", Integer, nullable=False),
    Column("samples", Integer, nullable=False),
    Column("load_sum", Double, nullable=False),
    # Sum of the squared loads of the ranks.
    Column("load_sq", Double, nullable=False),
    Column("compute_min", Double, nullable=False),
    Column("compute_max", Double, nullable=False),
    Column("compute_sum", Double, nullable=False),
    # Minimum of `sync_s` over ranks. The slowest rank does not wait for others, so this is the
    # duration of the communication alone.
    Column("sync_min", Double, nullable=False),
    # Mean step time over ranks.
    Column("step_s", Double, nullable=False),
    # Σ |ETT − T| / T over ranks with an ETT; T is the compute time.
    Column("ett_error_sum", Double),
    Column("ett_count", Integer, nullable=False),
    # Loss of the global batch: mean over ranks with the weights that their gradients have.
    Column("loss", Double),
    # Time when the last rank ended the step.
    Column("ended_at", Double, nullable=False),
    sqlite_with_rowid=False,
)

segments = Table(
    "segments",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("steps", Integer, nullable=False),
    Column("policy", Text, nullable=False),
    Column("version", Integer, nullable=False),
    # `controller`, `local`, `coast` or `equal`, see docs/glossary.md.
    Column("source", Text, nullable=False),
    Column("moved", Integer, nullable=False),
    Column("plan_s", Double, nullable=False),
    Column("adopted_at", Double, nullable=False),
    # The whole `Plan` as MessagePack.
    Column("body", LargeBinary, nullable=False),
    # Name of the synchronisation.
    Column("synchroniser", Text, nullable=False, server_default="allreduce"),
    # See `Plan.why`.
    Column("why", Text, nullable=False, server_default=""),
    # Digest of the synchronisation and its parameters.
    Column("synchroniser_digest", Text, nullable=False, server_default=""),
    # Why ranks all-reduced gradients although the synchronisation is relaxed. Empty: they did
    # not, or it is unknown whether they did.
    Column("fallback", Text, nullable=False, server_default=""),
    # Number of the samples counted in `moved` that move to another node.
    Column("across", Integer, nullable=False, server_default="0"),
    Index("ix_segments_run_first_step", "run", "first_step"),
    # Segments that no controller planned. With the index, a query for
    # them does not read the `body` of the other segments.
    Index(
        "ix_segments_coasts",
        "run",
        "first_step",
        "steps",
        "source",
        sqlite_where=text("source IN ('coast', 'local')"),
        postgresql_where=text("source IN ('coast', 'local')"),
    ),
    # Segments for which a policy chose the synchronisation.
    Index(
        "ix_segments_choices",
        "run",
        "first_step",
        sqlite_where=text("why <> ''"),
        postgresql_where=text("why <> ''"),
    ),
    # Segments in which ranks did not wait for each other.
    Index(
        "ix_segments_apart",
        "run",
        "first_step",
        "steps",
        sqlite_where=text("synchroniser <> 'allreduce' AND fallback = ''"),
        postgresql_where=text("synchroniser <> 'allreduce' AND fallback = ''"),
    ),
    Index(
        "ix_segments_fallbacks",
        "run",
        "first_step",
        sqlite_where=text("fallback <> ''"),
        postgresql_where=text("fallback <> ''"),
    ),
)

# One row per round of relaxed synchronisation, from the rank that reports it.
rounds = Table(
    "rounds",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("seq", BigInteger, primary_key=True),
    Column("segment", BigInteger, nullable=False),
    Column("number", BigInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("world", Integer, nullable=False),
    Column("contributors", Integer, nullable=False),
    # A list as MessagePack.
    Column("staleness", LargeBinary, nullable=False),
    Column("dropped", Integer, nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("reduced_s", Double, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("copied_s", Double, nullable=False, server_default="0"),
    Index("ix_rounds_run_step", "run", "step"),
    sqlite_with_rowid=False,
)

# For each rank, its newest report that it has been in the same phase for a long time.
long_phases = Table(
    "long_phases",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("phase", Text, nullable=False),
    Column("since_s", Double, nullable=False),
    # Time of the report, by the node's clock.
    Column("at", Double, nullable=False),
    # Time when the report was stored, by the clock of the process that stored it.
    Column("heard_at", Double, nullable=False),
    sqlite_with_rowid=False,
)

# For data sets that are stored on the nodes: one row per attempt, epoch and rank.
data_epochs = Table(
    "data_epochs",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("epoch", Integer, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("node", Text, nullable=False),
    Column("planned_bytes", BigInteger, nullable=False),
    Column("moved_bytes", BigInteger, nullable=False),
    Column("moved", BigInteger, nullable=False),
    Column("moved_s", Double, nullable=False),
    Column("read_bytes", BigInteger, nullable=False),
    Column("read", BigInteger, nullable=False),
    Column("waits", BigInteger, nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("held_bytes", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    sqlite_with_rowid=False,
)

# One row per metric, step and rank. Only runs whose scripts log metrics besides the loss have rows.
worker_metrics = Table(
    "worker_metrics",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("weight", Double, nullable=False),
    # NULL: not a finite number.
    Column("value", Double),
    sqlite_with_rowid=False,
)

# Metrics of the global batch: means over ranks, weighted by `worker_metrics.weight`.
step_metrics = Table(
    "step_metrics",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("name", Text, primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("value", Double),
    sqlite_with_rowid=False,
)

# One row per evaluation, metric and rank that reported the metric.
evaluations = Table(
    "evaluations",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("step", BigInteger, primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("name", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("epoch", Integer, nullable=False),
    Column("trained", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    Column("samples", BigInteger),
    # NULL: not a finite number.
    Column("value", Double),
    sqlite_with_rowid=False,
)

# Names of a step's metrics. `rollups.metrics.METRICS` computes each of them from a row of `steps`.
METRIC_NAMES = (
    *("step_s", "compute_max", "compute_min", "compute_mean", "se", "sp"),
    *("dif", "waste", "ett_error", "comm_s", "loss"),
)
# Metrics that are NULL for some steps.
OPTIONAL_METRICS = ("se", "dif", "waste", "ett_error", "loss")


def _of_metrics() -> Iterator[Column[float] | Column[int]]:
    for name in METRIC_NAMES:
        if name in OPTIONAL_METRICS:
            # Number of steps that have a value.
            yield Column(f"{name}_count", Integer, nullable=False)
        for kind in ("sum", "min", "max"):
            yield Column(f"{name}_{kind}", Double)


# One row per block (`rollups.metrics.BLOCK` consecutive steps) whose steps are all complete.
step_rollups = Table(
    "step_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The first step of the block.
    Column("step", BigInteger, primary_key=True),
    # The epoch of the first step.
    Column("epoch", Integer, nullable=False),
    # The end of the last step.
    Column("ended_at", Double, nullable=False),
    *_of_metrics(),
    sqlite_with_rowid=False,
)

# One row per block and rank, for the blocks that have a row in `step_rollups`.
rank_rollups = Table(
    "rank_rollups",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The first step of the block.
    Column("step", BigInteger, primary_key=True),
    Column("rank", Integer, primary_key=True),
    # The latest attempt among the rank's records in the block.
    Column("attempt", SmallInteger, nullable=False),
    # Number of records in the block.
    Column("count", Integer, nullable=False),
    Column("compute_s_sum", Double, nullable=False),
    Column("compute_s_min", Double, nullable=False),
    Column("compute_s_max", Double, nullable=False),
    Column("ett_s_sum", Double),
    Column("ett_s_count", Integer, nullable=False),
    Column("wait_s_sum", Double, nullable=False),
    Column("samples_sum", BigInteger, nullable=False),
    Column("load_sum", Double, nullable=False),
    Column("share_sum", Double),
    Column("share_count", Integer, nullable=False),
    # Sums over records with samples, to fit the line "time = a · load + b".
    Column("fit_count", Integer, nullable=False),
    Column("fit_load", Double, nullable=False),
    Column("fit_time", Double, nullable=False),
    Column("fit_load_sq", Double, nullable=False),
    Column("fit_load_time", Double, nullable=False),
    sqlite_with_rowid=False,
)

# Sums over the complete steps of a run: one row per policy version and day. The worker process
# writes the rows, so that lists and reports of runs need not read millions of steps.
run_days = Table(
    "run_days",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # Days since 1970-01-01, UTC.
    Column("day", Integer, primary_key=True, autoincrement=False),
    # The version of the policy that planned the steps.
    Column("version", Integer, primary_key=True, autoincrement=False),
    Column("steps", BigInteger, nullable=False),
    Column("step_s_sum", Double, nullable=False),
    # Duration of the steps, summed over all ranks, and the part of this sum in which ranks waited
    # for slower ranks.
    Column("worker_s", Double, nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("se_sum", Double, nullable=False),
    # Number of steps that have an SE; `waste_count` likewise for the waste.
    Column("se_count", BigInteger, nullable=False),
    Column("waste_sum", Double, nullable=False),
    Column("waste_count", BigInteger, nullable=False),
    Index("ix_run_days_day", "day"),
    sqlite_with_rowid=False,
)

# Progress of a run when the worker process last checked it.
run_progress = Table(
    "run_progress",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    # The latest attempt. -1: none yet.
    Column("attempt", Integer, nullable=False),
    # The newest complete step. -1: none yet.
    Column("step", BigInteger, nullable=False),
    # When `step` was first seen, by the database's clock.
    Column("step_at", Double, nullable=False),
    # Number of records that were lost because a spool was full.
    Column("lost", BigInteger, nullable=False),
    # When `lost` last increased.
    Column("lost_at", Double),
    # Number of epochs with samples that were used twice or skipped. NULL: unknown.
    Column("inexact", Integer),
    sqlite_with_rowid=False,
)

# Verdicts about a run's newest steps. Consecutive verdicts with the same causes share one row.
verdicts = Table(
    "verdicts",
    metadata,
    Column("run", Text, primary_key=True),
    # Time of the first and of the last verdict with these causes.
    Column("at", Double, primary_key=True),
    Column("until", Double, nullable=False),
    Column("workers", Integer, nullable=False),
    # Node → {"ranks" that are slow, "kinds" of their causes, "share" of the wall time that these
    # causes cost, "factor" of the slowdown}.
    Column("nodes", JSON, nullable=False),
    # The last verdict with these causes, as GET /runs/{run}/verdict returns it.
    Column("body", JSON, nullable=False),
    Index("ix_verdicts_until", "until"),
    sqlite_with_rowid=False,
)

# Periods in which verdicts named a node of a run slow. At most one row per run has no end.
slow_nodes = Table(
    "slow_nodes",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("at", Double, primary_key=True),
    Column("node", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    # The newest step that the first verdict of the period was based on.
    Column("step", BigInteger, nullable=False),
    # The node's time ÷ the other nodes' time, from the newest verdict.
    Column("factor", Double),
    Column("words", Text, nullable=False),
    Column("ended_at", Double),
    Index("ix_slow_nodes_node", "node"),
    sqlite_with_rowid=False,
)

# Forecasts of the time that each preset would take, from a run's telemetry up to a step.
forecasts = Table(
    "forecasts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("made_at", Double, primary_key=True),
    # A `whatif.answer.Forecast`.
    Column("body", JSON, nullable=False),
)

# Measured effects of policy switches. Rows outlive the runs that they are about, so that forecasts
# can be scored over all runs.
effects = Table(
    "effects",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("run", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("policy", Text, nullable=False),
    Column("backend", Text, nullable=False),
    # Number of nodes that the ranks ran on. NULL: unknown.
    Column("nodes", Integer),
    Column("ranks", Integer),
    # Time of the switch.
    Column("at", Double, nullable=False),
    Column("noted_at", Double, nullable=False),
    # Whether the effect is final, so that later steps cannot change it.
    Column("complete", Boolean, nullable=False),
    # Whether the effect was measured and there is a forecast of it.
    Column("scored", Boolean, nullable=False),
    # The effect, as GET /runs/{run}/effects returns it, but without `words`, `metrics` and
    # `metrics_words`.
    Column("body", JSON, nullable=False),
    Index("uq_effects_run", "run", "version", unique=True),
    Index("ix_effects_at", "at"),
)

alerts = Table(
    "alerts",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("rule", Text, nullable=False),
    # Public id of the run. Empty: the alert is about the control plane.
    Column("run", Text, nullable=False),
    Column("severity", Text, nullable=False),
    Column("value", Double, nullable=False),
    Column("threshold", Double, nullable=False),
    Column("words", Text, nullable=False),
    # Times are by the database's clock. NULL: not yet. `since` is the time of the first evaluation
    # that found the condition true, and `gone_at` of the first evaluation that found it false.
    Column("since", Double, nullable=False),
    Column("raised_at", Double),
    Column("gone_at", Double),
    Column("resolved_at", Double),
    Column("acknowledged_at", Double),
    Column("acknowledged_by", Text),
    Column("acknowledged_why", Text),
    Index("ix_alerts_raised_at", "raised_at"),
    Index("ix_alerts_run", "run"),
    # Unique, so that two concurrent worker processes cannot raise the same alert twice.
    Index(
        "uq_alerts_open",
        "rule",
        "run",
        unique=True,
        sqlite_where=text("resolved_at IS NULL"),
        postgresql_where=text("resolved_at IS NULL"),
    ),
)

webhooks = Table(
    "webhooks",
    metadata,
    Column("key", BigKey, primary_key=True),
    # The public id. The webhook's secret is derived from it and from the control plane's secret.
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("url", Text, nullable=False),
    # The lowest severity that the webhook receives.
    Column("severity", Text, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
)

# Notifications, one per webhook and event of an alert.
alert_deliveries = Table(
    "alert_deliveries",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("webhook", BigInteger, ForeignKey("webhooks.key", ondelete="CASCADE"), nullable=False),
    Column("alert", BigInteger, ForeignKey("alerts.key", ondelete="CASCADE"), nullable=False),
    # `raised` or `resolved`.
    Column("event", Text, nullable=False),
    # Exactly the bytes that are sent and signed.
    Column("body", LargeBinary, nullable=False),
    # Time of the next attempt to send the notification. During an attempt: the time from which
    # another worker process may try, in case the sending process has died. NULL: no further
    # attempt, because the notification was sent or given up.
    Column("due_at", Double),
    Column("tries", Integer, nullable=False),
    Column("tried_at", Double),
    # HTTP status of the last attempt. NULL: there was no response.
    Column("status", Integer),
    # Error of the last attempt. NULL: it succeeded.
    Column("error", Text),
    Index("uq_alert_deliveries_event", "alert", "webhook", "event", unique=True),
    Index(
        "ix_alert_deliveries_due",
        "due_at",
        sqlite_where=text("due_at IS NOT NULL"),
        postgresql_where=text("due_at IS NOT NULL"),
    ),
    Index("ix_alert_deliveries_webhook_key", "webhook", "key"),
)
