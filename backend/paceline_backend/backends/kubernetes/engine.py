"""Operations of the engine `kubernetes`, as calls of the Kubernetes REST API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from paceline_backend.backends.base import NewRunError, options_of
from paceline_backend.backends.engine import (
    Availability,
    Engine,
    EngineAwayError,
    EngineRefusedError,
    Job,
    Order,
)
from paceline_backend.backends.kubernetes import access, looking, manifests
from paceline_backend.backends.kubernetes.api import Api
from paceline_backend.backends.kubernetes.options import KubernetesOptions
from paceline_backend.store.new_runs import NewRun

IMAGE = "PACELINE_KUBERNETES_IMAGE"
NAMESPACES = "PACELINE_KUBERNETES_NAMESPACES"
_HOST = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_CONFLICT, _MISSING, _FORBIDDEN = 409, 404, 403
_LABELLED = {"labelSelector": manifests.LABEL}
_NO_PODS = {"fieldSelector": "involvedObject.kind=Job,reason=FailedCreate"}


class Kubernetes(Engine):
    """`Engine` for Kubernetes. A run starts as one Job; each node that joins later is another Job.

    A job's ``ref`` is ``NAMESPACE/NAME``.
    """

    name: ClassVar[str] = "kubernetes"
    title: ClassVar[str] = "Kubernetes"
    options: ClassVar[type[msgspec.Struct]] = KubernetesOptions
    keeps_ended: ClassVar[bool] = True

    def availability(self) -> Availability:
        """Query the API server's version, and the Jobs of the first namespace."""
        try:
            with Api() as api:
                version = api.call("GET", "/version").get("gitVersion")
                api.call("GET", _jobs(namespaces()[0]), params={"limit": "1"})
        except (EngineAwayError, EngineRefusedError) as error:
            return Availability(False, problem=str(error))
        return Availability(True, version)

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Validate a new run as every engine does, and also its image and its namespace."""
        super().check(new, launch=launch)
        options = options_of(KubernetesOptions, new.backend_options)
        if not _image(options):
            raise NewRunError(
                "backend_options.image", f"give the pods' image, or set {IMAGE} for the server"
            )
        if options.namespace is not None and options.namespace not in (known := _namespaces()):
            raise NewRunError(
                "backend_options.namespace",
                f"the server may only use: {', '.join(known)}; set {NAMESPACES} to allow others",
            )

    def submit(self, order: Order) -> str:
        """Create the Secret and the Job, or use existing ones; make the Job the Secret's owner."""
        options = order.options
        assert isinstance(options, KubernetesOptions)
        namespace = options.namespace or namespaces()[0]
        image = _image(options)
        # The web process has checked the namespace and the image, but this worker may have other
        # environment variables.
        if namespace not in namespaces():
            raise EngineRefusedError(
                f"the worker process may not use namespace {namespace}: add it to its {NAMESPACES}"
            )
        if not image:
            raise EngineRefusedError(
                f"the run has no image: give the option image, or set {IMAGE} for the worker"
            )
        name = manifests.name_of(order)
        with Api() as api:
            _write_secret(api, namespace, order)
            try:
                job = _make_job(api, namespace, order, manifests.job(order, options, image))
            except EngineRefusedError:
                api.call("DELETE", _secrets(namespace, name), unless=[_MISSING])
                raise
            api.call("PATCH", _secrets(namespace, name), manifests.owned_by(job))
        return f"{namespace}/{name}"

    def look(self, prefix: str) -> Sequence[Job]:
        """List Jobs and their pods in each namespace.

        If a Job has fewer pods than requested, events are listed, too, because they give the
        reason.
        """
        known: list[Job] = []
        try:
            with Api() as api:
                for namespace in namespaces():
                    jobs = api.call("GET", _jobs(namespace), params=_LABELLED)["items"]
                    pods = api.call("GET", _pods(namespace), params=_LABELLED)["items"]
                    lacking = looking.lack_pods(prefix, jobs, pods)
                    events = _refusals(api, namespace) if lacking else []
                    known += looking.jobs(prefix, jobs, pods, events)
        except EngineRefusedError as error:
            raise EngineAwayError(str(error)) from error
        return known

    def stop(self, refs: Sequence[str]) -> None:
        """Delete Jobs. Their pods get SIGTERM, and SIGKILL after 30 s."""
        if not refs:
            return
        with Api() as api:
            for ref in refs:
                namespace, _, name = ref.partition("/")
                options = {"propagationPolicy": "Foreground"}
                api.call("DELETE", _jobs(namespace, name), options, unless=[_MISSING])
                api.call("DELETE", _secrets(namespace, name), unless=[_MISSING])

    def cordon(self, host: str, reason: str | None) -> None:
        """Mark a machine as unschedulable; see `cordon_as`."""
        self.cordon_as("", host, reason)

    def cordon_as(self, plane: str, host: str, reason: str | None) -> None:
        """Mark a machine as unschedulable, with reason and control plane as annotations.

        Cordons of other control planes and of other users are not changed. If a user lifts
        Paceline's cordon by hand, its annotations stay on the machine; a cordon that is set
        afterwards counts as another user's.

        Raises:
            EngineAwayError: the API server does not answer.
            EngineRefusedError: there is no such machine, or the server may not cordon machines.
        """
        if not _HOST.fullmatch(host):
            raise EngineRefusedError(f"{host!r} is not a valid machine name")
        with Api() as api:
            node = api.call("GET", _node(host), unless=[_MISSING] if reason is None else [])
            # The machine no longer exists, and neither does its cordon.
            if node is None:
                return
            change = manifests.cordon_patch(node, plane, reason)
            if change is not None:
                named = {"fieldManager": manifests.field_manager(plane)}
                api.call("PATCH", _node(host), change, params=named)


def namespaces() -> list[str]:
    """Return the namespaces in which the server may create Jobs; the first is the default.

    Raises:
        EngineAwayError: the kubeconfig cannot be read.
    """
    named = [word.strip() for word in os.environ.get(NAMESPACES, "").split(",")]
    return [name for name in named if name] or [access.find().namespace]


def _namespaces() -> list[str]:
    try:
        return namespaces()
    except EngineAwayError as error:
        raise NewRunError("backend", str(error)) from error


def _image(options: KubernetesOptions) -> str:
    return options.image or os.environ.get(IMAGE, "")


def _write_secret(api: Api, namespace: str, order: Order) -> None:
    # The Secret can exist already, if a worker was killed before it created the Job.
    body = manifests.secret(order)
    if api.call("POST", _secrets(namespace), body, unless=[_CONFLICT]) is None:
        change: dict[str, Any] = {"stringData": body["stringData"]}
        api.call("PATCH", _secrets(namespace, manifests.name_of(order)), change)


def _make_job(api: Api, namespace: str, order: Order, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Create the Job, or return the existing Job if it has the same label."""
    job: Mapping[str, Any] | None = api.call("POST", _jobs(namespace), body, unless=[_CONFLICT])
    if job is None:
        name = manifests.name_of(order)
        job = api.call("GET", _jobs(namespace, name))
        assert job is not None
        if job["metadata"].get("labels", {}).get(manifests.LABEL) != order.label:
            raise EngineRefusedError(f"Job {name} exists already, but with another label")
    return job


def _refusals(api: Api, namespace: str) -> Sequence[Mapping[str, Any]]:
    """Return events about pods that could not be created; empty if listing is forbidden."""
    listed = api.call("GET", _events(namespace), params=_NO_PODS, unless=[_FORBIDDEN])
    items: list[Mapping[str, Any]] = [] if listed is None else listed["items"]
    return items


def _jobs(namespace: str, name: str = "") -> str:
    return _path("/apis/batch/v1", namespace, "jobs", name)


def _pods(namespace: str) -> str:
    return _path("/api/v1", namespace, "pods")


def _events(namespace: str) -> str:
    return _path("/api/v1", namespace, "events")


def _secrets(namespace: str, name: str = "") -> str:
    return _path("/api/v1", namespace, "secrets", name)


def _node(name: str) -> str:
    return f"/api/v1/nodes/{name}"


def _path(group: str, namespace: str, kind: str, name: str = "") -> str:
    own = f"/{quote(name, safe='')}" if name else ""
    return f"{group}/namespaces/{quote(namespace, safe='')}/{kind}{own}"
