"""Backend `ray`: runs on Ray, through its Jobs API over HTTP, so the server need not install Ray.

Each job is a driver (`ray_driver`) that gets its nodes as one placement group, all at once or none.
The label of the `Order` is the job's submission id, so Ray itself refuses duplicate jobs. The label
is also in the job's metadata, by which `Ray.look` recognises Paceline's jobs.

The driver and its settings, which contain the nodes' token, are uploaded as a package of files.
This keeps the token secret: Ray shows a job's command line, variables and metadata to every client
of its API, but only the name of a package.
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
    Availability,
    Engine,
    EngineAwayError,
    EngineOptions,
    EngineRefusedError,
    Job,
    Order,
    Word,
)
from paceline_backend.backends.ray_api import ask, line, strange
from paceline_backend.store.new_runs import NewRun

# Oldest supported version of Ray. Its placement groups support `bundle_label_selector`, which is
# needed to avoid machines.
_LEAST = (2, 49)
_SUBMIT_S = 15.0
_LABEL = "paceline"
# Seconds between SIGTERM and SIGKILL for a driver. Ray's default of 3 s is too short for the nodes.
_STOP_WAIT_S = int(ray_driver.NODE_LEAVE_S) + 15
# Maximum number of placement groups in a list; Ray accepts no larger limit.
_MOST_PLACEMENT_GROUPS = 10_000
_ENTRYPOINT = f'exec "$(command -v python || command -v python3)" {ray_driver.NAME} drive'
_ENDED = frozenset(("STOPPED", "SUCCEEDED", "FAILED"))
# Errors that occur while an answer is parsed, if it does not come from Ray.
_STRANGE = (KeyError, TypeError, AttributeError)
_OWN = {"CPU": "cpus_per_node", "GPU": "gpus_per_node", "memory": "memory"}

Amount = Annotated[float, Meta(gt=0, le=1e15)]
ResourceName = Annotated[str, Meta(pattern=r"^[^\x00-\x1f]+$", max_length=200)]


class RayOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run on Ray."""

    cpus_per_node: (
        Annotated[
            int, Meta(ge=1, le=100_000, description="CPUs of each node; default: one per rank")
        ]
        | None
    ) = None
    gpus_per_node: Annotated[
        int, Meta(ge=0, le=10_000, description="GPUs of each node, which its ranks can use")
    ] = 0
    memory: (
        Annotated[
            int,
            Meta(ge=1, le=1 << 60, description="memory of each node in bytes, as Ray counts it"),
        ]
        | None
    ) = None
    resources: Annotated[
        dict[ResourceName, Amount],
        Meta(description="further resources that each node needs, with amounts", max_length=100),
    ] = msgspec.field(default_factory=dict)
    setup: Annotated[
        str,
        Meta(
            description="shell commands to run before each node starts, such as `module load cuda`",
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
    runtime_env: Annotated[
        dict[str, Any],
        Meta(
            description="Ray's runtime environment for the nodes, with keys such as pip or conda",
            max_length=100,
        ),
    ] = msgspec.field(default_factory=dict)


class Ray(Engine):
    """`Engine` for Ray. A run starts as one job, and each node that joins later is another job."""

    name: ClassVar[str] = "ray"
    title: ClassVar[str] = "Ray"
    options: ClassVar[type[msgspec.Struct]] = RayOptions

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Refuse runs that no job can execute, and options that Ray or Paceline does not accept."""
        super().check(new, launch=launch)
        options = options_of(RayOptions, new.backend_options)
        for name, option in _OWN.items():
            if name in options.resources:
                raise NewRunError("backend_options.resources", f"{name}: give {option} instead")
        _check_environment(options.runtime_env)

    def availability(self) -> Availability:
        """Query Ray's version. A Ray that lacks features which jobs need counts as unreachable."""
        try:
            version = str(ask("GET", "/api/version")["ray_version"])
            if _too_old(version):
                least = ".".join(map(str, _LEAST))
                return Availability(
                    False, version, f"Ray {version} is too old: {least} or newer is needed"
                )
            return Availability(True, version)
        except EngineAwayError as error:
            return Availability(False, problem=str(error))
        except _STRANGE:
            return Availability(False, problem=str(strange()))

    def submit(self, order: Order) -> str:
        """Upload the package with the driver, unless Ray has it already, and submit the job."""
        content = _package(order)
        name = f"_ray_pkg_{hashlib.sha256(content).hexdigest()[:32]}.zip"
        place = f"/api/packages/gcs/{name}"
        # The query also makes Ray keep an existing package for a while.
        if ask("GET", place, missing_is_none=True) is None:
            ask("PUT", place, body=content)
        body = _request(order, f"gcs://{name}")
        try:
            ask("POST", "/api/jobs/", body=body, timeout_s=_SUBMIT_S, may_refuse=True)
        except EngineRefusedError as error:
            if "already exists" not in str(error):
                raise
        return order.label

    def look(self, prefix: str) -> Sequence[Job]:
        """Return Paceline's jobs.

        Ray lists an ended job until the job is deleted or Ray's head node ends.
        """
        try:
            rows = ask("GET", "/api/jobs/")
            own = [row for row in rows if _label(row).startswith(prefix)]
            groups = _groups() if any(row["status"] not in _ENDED for row in own) else {}
            return [_job(row, groups.get(row["submission_id"])) for row in own]
        except _STRANGE:
            raise strange() from None

    def stop(self, refs: Sequence[str]) -> None:
        """Send SIGTERM to drivers, which forward it to nodes, and kill the nodes after a while."""
        for ref in refs:
            ask("POST", f"/api/jobs/{ref}/stop", missing_is_none=True)


def _too_old(version: str) -> bool:
    # Accept a version that cannot be parsed, such as the version of a development build.
    numbers = re.match(r"(\d+)\.(\d+)", version)
    return numbers is not None and (int(numbers[1]), int(numbers[2])) < _LEAST


def _check_environment(given: Mapping[str, Any]) -> None:
    field = "backend_options.runtime_env"
    if "working_dir" in given:
        raise NewRunError(
            f"{field}.working_dir", "give the run's cwd instead, which must exist on all nodes"
        )
    variables = given.get("env_vars", {})
    if not isinstance(variables, dict) or not all(isinstance(v, str) for v in variables.values()):
        raise NewRunError(f"{field}.env_vars", "give an object whose values are strings")


def _label(row: Mapping[str, Any]) -> str:
    metadata = row.get("metadata") or {}
    return str(metadata.get(_LABEL, "")) if row.get("submission_id") else ""


def _job(row: Mapping[str, Any], group: Mapping[str, Any] | None) -> Job:
    """Convert a row of Ray's list of jobs.

    `group` is the job's placement group, or None if its driver has not requested one yet.
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
    # For a driver that failed, Ray's message ends with the driver's log.
    message = (row.get("message") or "").strip()
    said = [text for text in message.splitlines() if text.startswith(ray_driver.FAILED)]
    if row.get("error_type") != "JOB_ENTRYPOINT_COMMAND_ERROR":
        words = message.partition("Full traceback")[0]
    elif said:
        words = said[-1]
    # The driver was killed, or it crashed and the log has Python's message.
    else:
        words = f"{message.partition(',')[0]}; see `ray job logs {row['submission_id']}`"
    return f"{row['status']}: {line(words)}"


def _wants(group: Mapping[str, Any]) -> str:
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
    query = {
        "detail": "true",
        "limit": str(_MOST_PLACEMENT_GROUPS),
        "filter_keys": "state",
        "filter_predicates": "!=",
        "filter_values": "REMOVED",
    }
    answer = ask("GET", f"/api/v0/placement_groups?{httpx.QueryParams(query)}")
    return {group["name"]: group for group in answer["data"]["result"]["result"]}


def _request(order: Order, package: str) -> dict[str, Any]:
    # Ray shows the whole body to every client, so it must contain no secrets.
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
        # Ray would set the variable to all CPUs of the worker, but the node's ranks share these
        # CPUs.
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
    """Zip the job's files, readable by their owner only; equal `Order`s give equal bytes."""
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
