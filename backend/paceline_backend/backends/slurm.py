"""Backend `slurm`: runs on Slurm, through `sbatch`, `squeue`, `scancel` and `scontrol`.

The nodes that a run needs at its start are one job, so Slurm allocates them all at once or not at
all. Nodes that join later are jobs of one node each. The label of the `Order` is the job's comment.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

import msgspec
from msgspec import Meta

from paceline.node.processes import die_with_parent
from paceline_backend.backends.engine import (
    Availability,
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Job,
    Order,
    Word,
)

_TIMEOUT_S = 20.0
_ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL"),
        *("OUT_OF_MEMORY", "PREEMPTED", "REVOKED", "SPECIAL_EXIT", "TIMEOUT"),
    )
)
# Name of a single node: lists of nodes do not match.
_HOST = re.compile(r"(?!ALL$)[a-z0-9][a-z0-9_.-]*", re.I)
_QUEUED = frozenset(("PENDING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD"))
# Messages that Slurm's commands print if slurmctld does not answer now. Any other message means
# that Slurm permanently refuses the job.
_AWAY = re.compile(
    "unable to contact|connection (refused|failure|reset)|timed out|zero bytes|try again|"
    "temporarily|munge|authentication|slurmctld",
    re.I,
)
# Variables that Slurm's commands get from this process. Slurm passes the environment of `sbatch` to
# the job, so the process's secrets must not be among them.
_PASSED = ("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "SLURM_CONF", "SLURM_JWT")


class SlurmOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run on Slurm. Slurm's own defaults apply to missing options."""

    partition: (
        Annotated[Word, Meta(description="partition of the job, as sbatch --partition")] | None
    ) = None
    account: Annotated[Word, Meta(description="account of the job, as sbatch --account")] | None = (
        None
    )
    qos: Annotated[Word, Meta(description="quality of service, as sbatch --qos")] | None = None
    reservation: (
        Annotated[Word, Meta(description="reservation that the job uses, as sbatch --reservation")]
        | None
    ) = None
    time_limit: (
        Annotated[
            Word, Meta(description="time limit of the job, as sbatch --time, such as 8:00:00")
        ]
        | None
    ) = None
    constraint: (
        Annotated[Word, Meta(description="features that nodes must have, as sbatch --constraint")]
        | None
    ) = None
    exclude: (
        Annotated[Word, Meta(description="nodes that the job must not use, as sbatch --exclude")]
        | None
    ) = None
    gpus_per_node: (
        Annotated[Word, Meta(description="GPUs of each node, as sbatch --gpus-per-node")] | None
    ) = None
    memory: Annotated[Word, Meta(description="memory of each node, as sbatch --mem")] | None = None
    cpus_per_node: (
        Annotated[
            int, Meta(ge=1, le=100_000, description="CPUs of each node; default: one per rank")
        ]
        | None
    ) = None
    exclusive: Annotated[
        bool, Meta(description="share no node with other jobs, as sbatch --exclusive")
    ] = False
    output: Annotated[Word, Meta(description="log file of the job, as sbatch --output")] | None = (
        None
    )
    setup: Annotated[
        str,
        Meta(
            description="shell commands to run before the nodes start, such as `module load cuda`",
            pattern=r"^[^\x00]*$",
            max_length=10_000,
        ),
    ] = ""
    paceline: (
        Annotated[
            Word,
            Meta(
                description="command that runs `paceline` on the nodes; default: this "
                "server's Python with `-m paceline`"
            ),
        ]
        | None
    ) = None


_AS_SBATCH = {
    "partition": "partition",
    "account": "account",
    "qos": "qos",
    "reservation": "reservation",
    "time_limit": "time",
    "constraint": "constraint",
    "exclude": "exclude",
    "gpus_per_node": "gpus-per-node",
    "memory": "mem",
    "output": "output",
}


class Slurm(Engine):
    """`Engine` for Slurm. A run starts as one job; each node that joins later is another job."""

    name: ClassVar[str] = "slurm"
    title: ClassVar[str] = "Slurm"
    options: ClassVar[type[msgspec.Struct]] = SlurmOptions

    def availability(self) -> Availability:
        """Query the configuration of slurmctld."""
        if shutil.which("sbatch") is None:
            return Availability(False, problem="there is no command sbatch: install Slurm's client")
        try:
            words = _asked("scontrol", "show", "config")
        except (EngineAwayError, EngineRefusedError) as error:
            return Availability(False, problem=str(error))
        version = re.search(r"^SLURM_VERSION\s*=\s*(\S+)", words, re.M)
        return Availability(True, version[1] if version else None)

    def submit(self, order: Order) -> str:
        """Submit a job. Its script is passed on standard input, because it contains the token."""
        answer = _asked("sbatch", *_arguments(order), text=_script(order))
        # The cluster's name may follow the job's id after a semicolon.
        return answer.strip().partition(";")[0]

    def look(self, prefix: str) -> Sequence[Job]:
        """Return jobs of this process's user. Slurm lists an ended job only for some minutes."""
        columns = "--format=%i|%T|%r|%k"
        who = f"--user={os.getuid()}"
        try:
            answer = _asked("squeue", "--noheader", "--states=all", who, columns)
        except EngineRefusedError as error:
            raise EngineAwayError(str(error)) from error
        lines = (line.split("|", 3) for line in answer.splitlines())
        return [_job(*line) for line in lines if len(line) == 4 and line[3].startswith(prefix)]

    def stop(self, refs: Sequence[str]) -> None:
        """Send SIGTERM. Slurm sends SIGKILL after its KillWait, which is 30 s by default."""
        if refs:
            _asked("scancel", "--quiet", *refs, refused_is_done=True)

    def cordon(self, host: str, reason: str | None) -> None:
        """Drain a node, or end its drain; see `cordon_as`."""
        self.cordon_as("", host, reason)

    def cordon_as(self, plane: str, host: str, reason: str | None) -> None:
        """Drain a node, or end a drain whose reason contains this control plane's id."""
        mark = f"paceline:{plane} "
        if not _HOST.fullmatch(host):
            raise EngineRefusedError(f"{host!r} is not a valid node name")
        try:
            shown = _asked("scontrol", "--oneliner", "show", "node", host)
        except EngineRefusedError:
            # The node no longer exists, and neither does its drain.
            if reason is None:
                return
            raise
        state = re.search(r" State=(\S+)", shown)
        said = re.search(r" Reason=(.*)", shown)
        drained = state is not None and "DRAIN" in state[1]
        ours = said is not None and said[1].startswith(mark)
        if reason is None:
            if drained and ours:
                _asked("scontrol", "update", f"NodeName={host}", "State=UNDRAIN")
        # Do not overwrite a reason that another user has set, even if the node is not drained.
        elif ours or said is None:
            words = mark + " ".join(reason.split())
            _asked("scontrol", "update", f"NodeName={host}", "State=DRAIN", f"Reason={words}")


def _job(ref: str, state: str, reason: str, label: str) -> Job:
    kind: Literal["queued", "running", "ended"] = "running"
    words = reason
    cancelled = state == "CANCELLED"
    if state in _QUEUED:
        kind = "queued"
    elif state in _ENDED:
        kind = "ended"
        words = state if reason in ("None", "") else f"{state} ({reason})"
    return Job(label.strip(), ref, kind, words, cancelled)


def _arguments(order: Order) -> list[str]:
    options = order.options
    assert isinstance(options, SlurmOptions)
    values = {name: getattr(options, name) for name in _AS_SBATCH}
    exclude = [
        *([options.exclude] if options.exclude else []),
        *(host for host in order.avoid if _HOST.fullmatch(host)),
    ]
    values["exclude"] = ",".join(exclude) or None
    return [
        *("--parsable", "--no-requeue", "--no-kill", "--export=ALL"),
        f"--comment={order.label}",
        f"--job-name=paceline-{order.run}",
        f"--nodes={order.nodes}",
        "--ntasks-per-node=1",
        f"--cpus-per-task={options.cpus_per_node or order.nproc}",
        "--signal=TERM@30",
        f"--chdir={order.cwd}",
        *(["--exclusive"] if options.exclusive else []),
        *(f"--{_AS_SBATCH[name]}={value}" for name, value in values.items() if value is not None),
    ]


def _script(order: Order) -> str:
    """Return the script that Slurm runs on the job's first node.

    The script's options of `srun` start one task on each node, and let the other tasks continue
    when a task ends.
    """
    options = order.options
    assert isinstance(options, SlurmOptions)
    paceline = options.paceline or shlex.join([sys.executable, "-P", "-m", "paceline"])
    slot = '"$SLURM_JOB_ID.$SLURM_PROCID"'
    node = f'exec {paceline} node --run {order.run} --slot {slot} --host "$SLURMD_NODENAME"'
    cpus = options.cpus_per_node or order.nproc
    lines = [
        "#!/bin/sh",
        f"export PACELINE_SERVER={shlex.quote(order.server)}",
        f"export PACELINE_TOKEN={shlex.quote(order.token)}",
        options.setup,
        f"exec srun --export=ALL --kill-on-bad-exit=0 --no-kill --wait=0 --cpus-per-task={cpus} "
        f"--ntasks-per-node=1 sh -c {shlex.quote(node)}",
    ]
    return "\n".join(lines) + "\n"


def _asked(*words: str, text: str = "", refused_is_done: bool = False) -> str:
    """Run a command of Slurm, and return its output.

    Raises:
        EngineAwayError: slurmctld does not answer.
        EngineRefusedError: slurmctld refuses, and `refused_is_done` is false. If `refused_is_done`
            is true, a refusal counts as success.
    """
    env = {name: os.environ[name] for name in _PASSED if name in os.environ}
    try:
        done = subprocess.run(
            words,
            input=text,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT_S,
            env=env,
            check=False,
            preexec_fn=die_with_parent,
        )
    except FileNotFoundError:
        raise EngineAwayError(f"there is no command {words[0]}: install Slurm's client") from None
    except subprocess.TimeoutExpired:
        raise EngineAwayError(f"{words[0]} did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode == 0 or (refused_is_done and not _AWAY.search(done.stderr)):
        return done.stdout
    said = " ".join(done.stderr.split())[:1000] or f"{words[0]} exited with {done.returncode}"
    raise (EngineAwayError if _AWAY.search(said) else EngineRefusedError)(said)
