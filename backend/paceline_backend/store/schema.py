"""The tables, declared once for SQLite and Postgres. migrations/ must reproduce exactly this."""

from __future__ import annotations

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
    """Text from wherever: NUL, which Postgres takes in no text, becomes U+FFFD."""

    impl = AnyText
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """What the database gets."""
        return None if value is None else value.replace("\0", "\N{REPLACEMENT CHARACTER}")


BigKey = BigInteger().with_variant(Integer, "sqlite")  # SQLite autoincrements INTEGER only

# What is true of this database as a whole: "id" names the control plane.
meta = Table(
    "meta",
    metadata,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),
)

# Who may do what. Secrets are not kept, only their hashes.
tokens = Table(
    "tokens",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("id", Text, nullable=False, unique=True),  # public
    Column("kind", Text, nullable=False),  # token browser
    Column("name", Text, nullable=False),
    Column("scope", Text, nullable=False),  # viewer operator agent admin
    Column("hash", Text, nullable=False),  # SHA-256 of the secret, hex
    Column("parent", Text),  # of a browser: id of the token that let it in
    Column("created_at", Double, nullable=False),
    Column("created_by", Text, nullable=False),
    Column("expires_at", Double),
    Column("revoked_at", Double),
    Column("used_at", Double),  # last; of a browser that used its link, too
    Column("node", Text),  # of an agent's token: the only node that it is for
    Column("via", Text),  # of a browser: id of the browser that asked for its link
    Column("run", Text),  # of an agent's token: the only run whose nodes it is for
)

repeats = Table(  # requests with an Idempotency-Key
    "repeats",
    metadata,
    Column("id", Text, primary_key=True),  # digest of the key and its requester
    Column("request", Text, nullable=False),  # digest of what was asked
    Column("at", Double, nullable=False),
    Column("answer", LargeBinary),  # sealed; NULL: being executed, or unknown
    Index("ix_repeats_at", "at"),
)

nodes = Table(
    "nodes",
    metadata,
    Column("id", Text, primary_key=True),
    Column("hostname", Text, nullable=False),
    Column("cores", Integer, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("gpus", JSON, nullable=False),
    Column("paceline", Text, nullable=False),
    Column("registered_at", Double, nullable=False),
    Column("heartbeat_at", Double, nullable=False),
    Column("left", Boolean, nullable=False),
    Column("runs", JSON, nullable=False),
    # Its agent has a session: it wants MACs and opens sealed launches.
    Column("signed", Boolean, nullable=False, server_default=false()),
    # The only run that its agent looks after: its session was made with the run's token. NULL: any.
    Column("only_run", Text),
    Column("backend", Text),  # the engine, and what it calls the machine; NULL: none, or unknown
    Column("host", Text),
    Column("check", JSON(none_as_null=True)),  # how fast it is, as its agent measured
    Column("checked_at", Double),  # by the node's clock
    Column("gpu_states", JSON(none_as_null=True)),  # clocks, temperatures and so on, as heard last
    # The token that its session was made with: the session ends with it. NULL: a proxy's user.
    Column("token", Text),
    # Random; its key and its password on the bus are derived from it. NULL: it has no session.
    Column("seed", Text),
)

runs = Table(
    "runs",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("id", Text, nullable=False, unique=True),  # public: in URLs, on the bus
    Column("name", Text, nullable=False),
    Column("state", Text, nullable=False),  # pending queued starting running …
    Column("backend", Text, nullable=False),  # local simulated slurm …
    # That launches it; of several nodes: that serves the rendezvous. NULL until it is chosen.
    Column("node", Text),
    Column("script", Text, nullable=False),
    Column("args", JSON, nullable=False),
    Column("env", JSON, nullable=False),  # names only: values are secrets
    Column("cwd", Text),
    Column("nproc", Integer, nullable=False),  # ranks on each node
    Column("max_restarts", Integer, nullable=False),
    Column("policy", Text, nullable=False),  # in force or requested last
    Column("version", Integer, nullable=False),  # of the policy: +1 at each switch
    Column("created_at", Double, nullable=False),
    Column("started_at", Double),
    Column("ended_at", Double),
    Column("seen_at", Double),  # when something of it was last stored, by this side's clock
    Column("lost", Boolean),  # its end is assumed from silence: a later message revives it
    Column("exit_code", Integer),
    Column("message", Text),
    Column("dropped", BigInteger, nullable=False),  # telemetry records lost to a full spool
    # From the leader's Hello; NULL before it.
    Column("attempt", Integer),
    Column("world", Integer),
    Column("samples", BigInteger),
    Column("global_batch", Integer),
    Column("seed", BigInteger),
    Column("loss_mean", Text),  # "samples", "size" or "ranks"
    Column("hello", LargeBinary),  # digest of the latest attempt's Hello, see `hello_parts`
    Column("revision", BigInteger, nullable=False, server_default="0"),  # +1 with each change
    # Of the latest launch: what an earlier one still says does not change the run's state.
    Column("first_attempt", Integer, nullable=False, server_default="0"),
    Column("attempts", Integer, nullable=False, server_default="0"),  # the highest known, plus 1
    Column("pruned_at", Double),  # since then its rows are being deleted, and nothing shows it
    # It has a user of the bus and a stream of its own: nobody else may speak for it.
    Column("signed", Boolean, nullable=False, server_default=false()),
    Column("nodes_min", Integer, nullable=False, server_default="1"),
    Column("nodes_max", Integer, nullable=False, server_default="1"),  # with `nproc` ranks on each
    # Where the launchers of several nodes meet, "address:port"; or a step of a launch anew, see
    # `store.nodes.run_nodes`.
    Column("rendezvous", Text),
    # Nodes that are held back for it while it trains, and whether a node that a verdict names slow
    # makes way for one of them without anybody asking.
    Column("spares", Integer, nullable=False, server_default="0"),
    Column("replace_slow_nodes", Boolean, nullable=False, server_default=false()),
    # What its backend was asked for, such as a partition.
    Column("backend_options", JSON(none_as_null=True)),
    # Of an engine: {"launch": n, "jobs": {part: the engine's name of the job, or null}}, and more:
    # see `store.jobs`.
    Column("backend_jobs", JSON(none_as_null=True)),
    # So long it may hang before its ranks are started again; NULL: it is left alone.
    Column("restart_hung_s", Double),
    Column("hang_ended", Integer),  # the attempt whose ranks the control plane ended last
    # So many times slower than the median a node may be that is taken without being named; 0: any.
    Column("join_check", Double, nullable=False, server_default="1.5"),
    Column("device", Text),  # from the leader's Hello
    Column("note", Text, nullable=False, server_default=""),  # what people wrote about it
    Column("summed_at", Double),  # when its `run_days` were last summed up, by this side's clock
    # What its operator wants of its model: {"metric", "value", "direction"}; NULL: nothing.
    Column("target", JSON(none_as_null=True)),
    Index("ix_runs_state", "state"),
)

# Short words by which people find runs again.
run_tags = Table(
    "run_tags",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("tag", Text, primary_key=True),
    Index("ix_run_tags_tag", "tag"),
    sqlite_with_rowid=False,
)

# Sums over the complete steps of a run, one row per day in which steps ended. The worker writes
# them: lists of runs and history are read from here, not from millions of steps.
run_days = Table(
    "run_days",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("day", Integer, primary_key=True, autoincrement=False),  # days since 1970-01-01, UTC
    Column("version", Integer, primary_key=True, autoincrement=False),  # of the policy in force
    Column("steps", BigInteger, nullable=False),
    Column("step_s_sum", Double, nullable=False),
    Column("worker_s", Double, nullable=False),  # time of all ranks in these steps,
    Column("waited_s", Double, nullable=False),  # and what they waited of it for slower ones
    Column("se_sum", Double, nullable=False),
    Column("se_count", BigInteger, nullable=False),  # steps that have an SE,
    Column("waste_sum", Double, nullable=False),
    Column("waste_count", BigInteger, nullable=False),  # and a waste
    Index("ix_run_days_day", "day"),
    sqlite_with_rowid=False,
)

# One row per node that the control plane launched a run of several nodes on.
run_nodes = Table(
    "run_nodes",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("node", Text, primary_key=True),
    Column("first_attempt", Integer, nullable=False),  # of the node's latest launch
    Column("state", Text, nullable=False),  # of the run on this node, as `runs.state`
    Column("attempt", Integer, nullable=False),
    Column("exit_code", Integer),
    Column("message", Text),
    Column("address", Text),  # where the node would serve the rendezvous; NULL until it says so
    Column("port", Integer),
    Column("launched_at", Double, nullable=False),
    Column("reported_at", Double),  # by the node's clock
    Column("met", Boolean, nullable=False),  # it was told where the launchers meet
    Column("lost", Boolean, nullable=False),  # its agent does not answer: a report revives it
    Column("leaving", Boolean, nullable=False),  # somebody asked it to leave the run
    Column("replaces", Text),  # the node that makes way for it, or that was lost
    # Its launcher is where all meet: who makes way for it may leave.
    Column("arrived", Boolean, nullable=False, server_default=false()),
    sqlite_with_rowid=False,
)

# Nodes that are held back for a run. They count while the run has not ended.
spares = Table(
    "spares",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("node", Text, primary_key=True),
    sqlite_with_rowid=False,
)

# When nodes were cordoned, and until when: NULL in `lifted_at` means that the node is.
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
    # Of an engine's node: the engine and its name of the machine. When the engine was told of the
    # cordon, or once that is lifted, of its end; or why it refuses. Both NULL: it is yet to be.
    Column("backend", Text),
    Column("host", Text),
    Column("told_at", Double),
    Column("refusal", Text),
    Index("ix_cordons_node_key", "node", "key"),
    Index(  # of two operators at once, one cordons
        "uq_cordons_present",
        "node",
        unique=True,
        sqlite_where=text("lifted_at IS NULL"),
        postgresql_where=text("lifted_at IS NULL"),
    ),
)

# Engines that may have jobs of a run, from the launch there until the engine has none. Rows outlast
# the run: `run` is a public id, and no key.
engine_runs = Table(
    "engine_runs",
    metadata,
    Column("backend", Text, primary_key=True),
    Column("run", Text, primary_key=True),
    sqlite_with_rowid=False,
)

# Since when verdicts named a node of a run slow, and until when. One row at most has no end.
slow_nodes = Table(
    "slow_nodes",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("at", Double, primary_key=True),
    Column("node", Text, nullable=False),
    Column("attempt", Integer, nullable=False),
    Column("step", BigInteger, nullable=False),  # the newest one that the first verdict rested on
    Column("factor", Double),  # its time ÷ the other nodes', as the newest verdict has it
    Column("words", Text, nullable=False),
    Column("ended_at", Double),
    Index("ix_slow_nodes_node", "node"),
    sqlite_with_rowid=False,
)

# The latest Hello of each run, MessagePack, and parts of Hellos that are on their way.
hello_parts = Table(
    "hello_parts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("hello", LargeBinary, primary_key=True),  # digest of the whole
    Column("number", Integer, primary_key=True),
    Column("data", LargeBinary, nullable=False),
)

# One row per Hello: where an attempt began, and how far those before it had come by then.
attempts = Table(
    "attempts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("attempt", SmallInteger, primary_key=True),
    Column("started_at", Double, nullable=False),
    Column("step", BigInteger, nullable=False),  # its first
    Column("reached", BigInteger, nullable=False),  # one past the last step of any before it
    Column("placement", JSON(none_as_null=True)),  # each rank's node; NULL: unknown
    Column("devices", JSON(none_as_null=True)),  # each rank's `wire.RankDevice`; NULL: unknown
    sqlite_with_rowid=False,
)

long_phases = Table(
    "long_phases",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("attempt", SmallInteger, nullable=False),
    Column("step", BigInteger, nullable=False),
    Column("phase", Text, nullable=False),
    Column("since_s", Double, nullable=False),  # how long by then
    Column("at", Double, nullable=False),  # by the node's clock
    Column("heard_at", Double, nullable=False),  # by ours
    sqlite_with_rowid=False,
)

# Where data lives on nodes: a row for each epoch, from each rank; what moved, from one of a node.
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
    Column("moved", BigInteger, nullable=False),  # samples
    Column("moved_s", Double, nullable=False),
    Column("read_bytes", BigInteger, nullable=False),  # from the source, by steps
    Column("read", BigInteger, nullable=False),
    Column("waits", BigInteger, nullable=False),  # steps
    Column("waited_s", Double, nullable=False),
    Column("held_bytes", BigInteger, nullable=False),
    Column("at", Double, nullable=False),
    sqlite_with_rowid=False,
)

switches = Table(
    "switches",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("version", Integer, primary_key=True),  # 0: the policy at the start
    Column("policy", Text, nullable=False),
    Column("parameters", JSON, nullable=False),
    Column("requested_at", Double, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("effective_step", BigInteger),  # first step planned by it
    Column("effective_at", Double),
    Column("why", Text, nullable=False, server_default=""),  # the reason that was given
)

# One row per rank and step; the primary key is the range that every query reads.
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
    Column("squares", Double, nullable=False, server_default="0"),  # Σ λ²
    Column("longest", Double, nullable=False, server_default="0"),
    Column("recompiles", Integer, nullable=False, server_default="0"),
    sqlite_with_rowid=False,
)

# One row per step that all ranks reported: sums from which SE, step DIF and waste follow at once.
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
    Column("load_sq", Double, nullable=False),  # Σ Λ_j²
    Column("compute_min", Double, nullable=False),
    Column("compute_max", Double, nullable=False),
    Column("compute_sum", Double, nullable=False),
    Column("sync_min", Double, nullable=False),  # communication: the last to arrive does not wait
    Column("step_s", Double, nullable=False),  # mean over ranks
    Column("ett_error_sum", Double),  # Σ |ETT − T| / T over ranks with an ETT
    Column("ett_count", Integer, nullable=False),
    Column("loss", Double),  # of the global batch: weighted as the gradients are
    Column("ended_at", Double, nullable=False),  # the last rank's
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
    Column("source", Text, nullable=False),  # controller, coast, equal
    Column("moved", Integer, nullable=False),
    Column("plan_s", Double, nullable=False),
    Column("adopted_at", Double, nullable=False),
    Column("body", LargeBinary, nullable=False),  # the whole Segment, MessagePack
    Column("synchroniser", Text, nullable=False, server_default="allreduce"),  # its name
    Column("why", Text, nullable=False, server_default=""),  # as `Segment.why`
    Column("synchroniser_digest", Text, nullable=False, server_default=""),  # with its parameters
    # Why ranks all-reduced gradients in spite of the synchroniser; empty: they did not, or it is
    # not known.
    Column("fallback", Text, nullable=False, server_default=""),
    Column("across", Integer, nullable=False, server_default="0"),  # of `moved`: to another node
    Index("ix_segments_run_first_step", "run", "first_step"),
    Index(  # where no controller planned, without the bodies in between
        "ix_segments_coasts",
        "run",
        "first_step",
        "steps",
        "source",
        sqlite_where=text("source = 'coast'"),
        postgresql_where=text("source = 'coast'"),
    ),
    Index(  # where policies choose synchronisers
        "ix_segments_choices",
        "run",
        "first_step",
        sqlite_where=text("why <> ''"),
        postgresql_where=text("why <> ''"),
    ),
    Index(  # where ranks did not wait for each other
        "ix_segments_apart",
        "run",
        "first_step",
        "steps",
        sqlite_where=text("synchroniser <> 'allreduce' AND fallback = ''"),
        postgresql_where=text("synchroniser <> 'allreduce' AND fallback = ''"),
    ),
    Index(  # where ranks fell back to the all-reduce
        "ix_segments_fallbacks",
        "run",
        "first_step",
        sqlite_where=text("fallback <> ''"),
        postgresql_where=text("fallback <> ''"),
    ),
)

# One row per round of a relaxed synchroniser, from the rank that tells of it.
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
    Column("staleness", LargeBinary, nullable=False),  # counts by age, MessagePack
    Column("dropped", Integer, nullable=False),
    Column("waited_s", Double, nullable=False),
    Column("reduced_s", Double, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("ended_at", Double, nullable=False),
    Column("copied_s", Double, nullable=False, server_default="0"),
    Index("ix_rounds_run_step", "run", "step"),
    sqlite_with_rowid=False,
)

# What an operator allows `auto` to do with a run. No row: nothing.
autos = Table(
    "autos",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("mode", Text, nullable=False),  # off recommend switch
    Column("requested_at", Double, nullable=False),
    Column("requested_by", Text, nullable=False),
    Column("relaxed", Boolean, nullable=False, server_default=false()),  # it may choose such
)

# What each preset would take, from a run's telemetry up to a step.
forecasts = Table(
    "forecasts",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("made_at", Double, primary_key=True),
    Column("step", BigInteger, nullable=False),  # the last one that it rests on
    Column("body", JSON, nullable=False),
)

# What switches changed, as far as it is known. Rows outlast the runs that they are about, so that
# forecasts can be scored over all runs: `run` is a public id, and no key.
effects = Table(
    "effects",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("run", Text, nullable=False),
    Column("version", Integer, nullable=False),
    Column("policy", Text, nullable=False),
    Column("backend", Text, nullable=False),
    Column("nodes", Integer),  # that ranks were on; NULL: unknown
    Column("ranks", Integer),
    Column("at", Double, nullable=False),  # of the switch
    Column("noted_at", Double, nullable=False),
    Column("first_step", BigInteger, nullable=False),
    Column("before_steps", Integer, nullable=False),
    Column("after_steps", Integer, nullable=False),
    Column("complete", Boolean, nullable=False),  # no later step counts
    Column("known", Boolean, nullable=False),
    Column("saving", Double),
    Column("low", Double),
    Column("high", Double),
    Column("forecast_saving", Double),
    Column("forecast_low", Double),
    Column("forecast_high", Double),
    Column("replaced", Boolean, nullable=False),
    # Policy and parameters are those before the switch: it has no effect to measure.
    Column("unchanged", Boolean, nullable=False, server_default=false()),
    Index("uq_effects_run", "run", "version", unique=True),
    Index("ix_effects_at", "at"),
)

# What a simulated run simulates.
scenarios = Table(
    "scenarios",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("body", JSON, nullable=False),
)

# Who changed what. Rows outlast the runs that they are about: `run` is a public id, and no key.
audit = Table(
    "audit",
    metadata,
    Column("key", BigKey, primary_key=True),
    Column("at", Double, nullable=False),
    Column("who", Text, nullable=False),
    Column("scope", Text, nullable=False),  # what that identity may do; "" of the control plane
    Column("address", Text, nullable=False),  # where the request came from
    Column("via", Text, nullable=False),  # the program that asked, as it calls itself
    Column("action", Text, nullable=False),  # run.policy, token.create, …
    Column("run", Text),
    Column("revision", BigInteger),  # the run's, after the change
    Column("target", Text, nullable=False),  # what else was changed, such as a token
    Column("why", Text, nullable=False),
    Column("details", JSON, nullable=False),
    Index("ix_audit_run_key", "run", "key"),
)

# Which control plane plans a run. Only the owner of an unexpired lease proposes segments.
leases = Table(
    "leases",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
)

# Which worker acts for a run on its engine. It is no matter of who plans the run.
engine_leases = Table(
    "engine_leases",
    metadata,
    Column("run", BigInteger, ForeignKey("runs.key", ondelete="CASCADE"), primary_key=True),
    Column("owner", Text, nullable=False),
    Column("expires_at", Double, nullable=False),
)
