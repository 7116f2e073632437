"""Runs on Ray: its Jobs API over HTTP, so the server needs no package of Ray.

Each job is a driver (`ray_driver`) that gets its nodes as one placement group, all at once or none.
The label is the job's submission id, so Ray itself refuses to take a job twice. It stands in the
job's metadata, too, by which jobs are known again.

The driver and its settings, with the nodes' token, are a package of files. Ray shows a job's
command line, variables and metadata to whoever asks its API, and of packages only the names.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shlex
import sys
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import httpx
import msgspec
from msgspec import Meta

from paceline_backend.backends import ray_driver
from paceline_backend.backends.base import NewRunError, options_of
from paceline_backend.backends.engine import (
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Facts,
    Job,
    Order,
    Word,
)
from paceline_backend.backends.ray_api import ask, line, strange
from paceline_backend.store.new_runs import NewRun

# The first whose placement groups heed `bundle_label_selector`, by which machines are avoided.
_LEAST = (2, 49)
_SUBMIT_S = 15.0
_LABEL = "paceline"  # in a job's metadata
_STOP_WAIT_S = int(ray_driver.GRACE_S) + 15  # else Ray kills a driver 3 s after SIGTERM
_MOST_GROUPS = 10_000  # Ray's own limit
_ENTRYPOINT = f'exec "$(command -v python || command -v python3)" {ray_driver.NAME} drive'
_ENDED = frozenset(("STOPPED", "SUCCEEDED", "FAILED"))
_STRANGE = (KeyError, TypeError, AttributeError)  # what an answer of something else leads to
_OWN = {"CPU": "cpus_per_node", "GPU": "gpus_per_node", "memory": "memory"}

Amount = Annotated[float, Meta(gt=0, le=1e15)]
ResourceName = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]+$", max_length=200)]


class RayOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a run may ask of Ray."""

    cpus_per_node: (
        Annotated[int, Meta(ge=1, le=100_000, description="default: one per rank")] | None
    ) = None
    gpus_per_node: Annotated[
        int, Meta(ge=0, le=10_000, description="ranks see these only; default: none")
    ] = 0
    memory: (
        Annotated[int, Meta(ge=1, le=1 << 60, description="of a node in bytes, as Ray counts it")]
        | None
    ) = None
    resources: Annotated[
        dict[ResourceName, Amount], Meta(description="further resources of a node", max_length=100)
    ] = msgspec.field(default_factory=dict)
    setup: Annotated[
        str,
        Meta(
            description="lines of sh on each node before it starts, such as `module load cuda`",
            pattern=r"^[^\x00]*$",
            max_length=10_000,
        ),
    ] = ""
    paceline: (
        Annotated[Word, Meta(description="the command on the nodes; default: this server's Python")]
        | None
    ) = None
    runtime_env: Annotated[
        dict[str, Any],
        Meta(description="Ray's, for the nodes: pip, conda, image_uri, env_vars …", max_length=100),
    ] = msgspec.field(default_factory=dict)


class Ray(Engine):
    """Each run is a job, and one more for each node that joins it. An `Engine`."""

    name: ClassVar[str] = "ray"
    title: ClassVar[str] = "Ray"
    options: ClassVar[type[msgspec.Struct]] = RayOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuses what no job could do, and options that Ray or we would not take."""
        super().check(new, launch=launch)
        options = options_of(RayOptions, new.backend_options)
        for name, option in _OWN.items():
            if name in options.resources:
                raise NewRunError("backend_options.resources", f"{name}: give {option} instead")
        _check_environment(options.runtime_env)

    def facts(self) -> Facts:
        """Asks for Ray's version; one that lacks something of what jobs need counts as away."""
        try:
            version = str(ask("GET", "/api/version")["ray_version"])
            if _too_old(version):
                least = ".".join(map(str, _LEAST))
                return Facts(
                    False, version, f"Ray {version} is too old: {least} or newer is needed"
                )
            return Facts(True, version)
        except EngineAwayError as error:
            return Facts(False, problem=str(error))
        except _STRANGE:
            return Facts(False, problem=str(strange()))

    def submit(self, order: Order) -> str:
        """Sends the package, unless Ray has it, and then the job."""
        content = _package(order)
        name = f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:32]}.zip"
        place = f"/api/packages/gcs/{name}"
        if ask("GET", place, missing_is_none=True) is None:  # a question keeps it for a while
            ask("PUT", place, body=content)
        body = _request(order, f"gcs://{name}")
        try:
            ask("POST", "/api/jobs/", body=body, timeout_s=_SUBMIT_S, may_refuse=True)
        except EngineRefusedError as error:
            if "already exists" not in str(error):
                raise
        return order.label

    def look(self, prefix: str) -> Sequence[Job]:
        """All jobs of ours; Ray knows ended ones until its head ends, or somebody deletes them."""
        try:
            rows = ask("GET", "/api/jobs/")
            own = [row for row in rows if _label(row).startswith(prefix)]
            groups = _groups() if any(row["status"] not in _ENDED for row in own) else {}
            return [_job(row, groups.get(row["submission_id"])) for row in own]
        except _STRANGE:
            raise strange() from None

    def stop(self, refs: Sequence[str]) -> None:
        """Drivers get SIGTERM, then nodes; what is left is killed after `ray_driver.GRACE_S`."""
        for ref in refs:
            ask("POST", f"/api/jobs/{ref}/stop", missing_is_none=True)


def _too_old(version: str) -> bool:
    """Whether a version is below the least; one that cannot be read is not."""
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < _LEAST


def _check_environment(given: Mapping[str, Any]) -> None:
    """Refuses what a job cannot have.

    Raises:
        NewRunError: names the option.
    """
    field = "backend_options.runtime_env"
    if "working_dir" in given:
        raise NewRunError(f"{field}.working_dir", "give the run's cwd, which all nodes have")
    variables = given.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(v, str) for v in variables.values()):
        raise NewRunError(f"{field}.env_vars", "expected an object with strings as values")


def _label(row: Mapping[str, Any]) -> str:
    """A job's label; empty: it is not ours."""
    metadata = row.get("metadata") or {}
    return str(metadata.get(_LABEL, "")) if row.get("submission_id") else ""


def _job(row: Mapping[str, Any], group: Mapping[str, Any] | None) -> Job:
    """A job of Ray's list.

    Args:
        row: its details.
        group: its placement group; None: its driver has not asked for it yet.
    """
    state: Literal["queued", "running", "ended"] = "running"
    reason = ""
    if row["status"] in _ENDED:
        state, reason = "ended", _end(row)
    elif group is None:
        state, reason = "queued", f"{row['status']}: {line(row.get('message') or '')}"
    elif group["state"] not in ("CREATED", "RESCHEDULING"):
        state, reason = "queued", _wants(group)
    cancelled = row["status"] == "STOPPED"
    return Job(_label(row), row["submission_id"], state, reason, cancelled)


def _end(row: Mapping[str, Any]) -> str:
    """How a job ended. Ray's message of a driver that failed ends with its log."""
    message = (row.get("message") or "").strip()
    said = [text for text in message.splitlines() if text.startswith(ray_driver.FAILED)]
    if row.get("error_type") != "JOB_ENTRYPOINT_COMMAND_ERROR":
        words = message.partition("Full traceback")[0]
    elif said:
        words = said[-1]
    else:  # it was killed, or it does not work: the log has what Python said
        words = f"{message.partition(',')[0]}; `ray job logs {row['submission_id']}` says more"
    return f"{row['status']}: {line(words)}"


def _wants(group: Mapping[str, Any]) -> str:
    """Why a placement group waits."""
    why = (group.get("stats") or {}).get("scheduling_state", group["state"])
    bundles = group.get("bundles") or []
    if not bundles:
        return str(why)
    amounts = ", ".join(
        f"{amount:g} {name}" for name, amount in bundles[0].get("unit_resources", {}).items()
    )
    nodes = "1 node" if len(bundles) == 1 else f"{len(bundles)} nodes"
    return f"{why}: {nodes} with {amounts}"


def _groups() -> dict[str, Mapping[str, Any]]:
    """The placement groups that are there, by name."""
    query = {
        "detail": "true",
        "limit": str(_MOST_GROUPS),
        "filter_keys": "state",
        "filter_predicates": "!=",
        "filter_values": "REMOVED",
    }
    answer = ask("GET", f"/api/v0/placement_groups?{httpx.QueryParams(query)}")
    return {group["name"]: group for group in answer["data"]["result"]["result"]}


def _request(order: Order, package: str) -> dict[str, Any]:
    """The body of a job: all of it can be seen."""
    options = order.options
    assert isinstance(options, RayOptions)
    variables = {
        **options.runtime_env.get("env_vars", {}),
        "RAY_JOB_STOP_WAIT_TIME_S": str(_STOP_WAIT_S),
    }
    return {
        "submission_id": order.label,
        "entrypoint": _ENTRYPOINT,
        "entrypoint_num_cpus": 0,
        "runtime_env": {**options.runtime_env, "working_dir": package, "env_vars": variables},
        "metadata": {_LABEL: order.label, "job_name": f"paceline-{order.run}"},
    }


def _settings(order: Order) -> dict[str, Any]:
    """What the driver and the keepers read."""
    options = order.options
    assert isinstance(options, RayOptions)
    cpus = options.cpus_per_node or order.nproc
    bundle: dict[str, float] = {"CPU": cpus, **options.resources}
    if options.gpus_per_node:
        bundle["GPU"] = options.gpus_per_node
    if options.memory:
        bundle["memory"] = options.memory
    env = {"PACELINE_SERVER": order.server, "PACELINE_TOKEN": order.token}
    if "OMP_NUM_THREADS" not in options.runtime_env.get("env_vars", {}):
        # Ray gives each worker as many threads as it has CPUs, and the ranks share them.
        env["OMP_NUM_THREADS"] = str(max(1, cpus // order.nproc))
    paceline = options.paceline or shlex.join([sys.executable, "-P", "-m", "paceline"])
    node = f'{paceline} node --run {order.run} --slot "$1" --host "$2"'
    return {
        "name": order.label,
        "nodes": order.nodes,
        "bundle": bundle,
        "avoid": list(order.avoid),
        "cwd": order.cwd,
        "env": env,
        "slot": order.run + order.label.partition(order.run)[2],
        "script": f"{options.setup}\nexec {node}",
    }


def _package(order: Order) -> bytes:
    """The job's files, always the same bytes for the same order; only their owner reads them."""
    files = {
        ray_driver.NAME: Path(ray_driver.__file__).read_text(),
        ray_driver.SETTINGS: json.dumps(_settings(order), sort_keys=True),
    }
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as package:
        for name, text in files.items():
            info = zipfile.ZipInfo(name)
            info.external_attr = 0o100600 << 16
            package.writestr(info, text)
    return content.getvalue()
