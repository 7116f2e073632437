"""Runs on Kubernetes: the verbs, in calls of its REST API."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar
from urllib.parse import quote

import msgspec

from paceline_backend.backends.base import NewRunError, options_of
from paceline_backend.backends.engine import (
    Engine,
    EngineAwayError,
    EngineRefusedError,
    Facts,
    Job,
    Order,
)
from paceline_backend.backends.kubernetes import access, cordons, looking, manifests
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
    """Each run is a Job, and one more for each node that joins it. An `Engine`.

    A job's ``ref`` is its namespace and its name, with a slash between.
    """

    name: ClassVar[str] = "kubernetes"
    title: ClassVar[str] = "Kubernetes"
    options: ClassVar[type[msgspec.Struct]] = KubernetesOptions
    keeps_ended: ClassVar[bool] = True

    def facts(self) -> Facts:
        """Asks for the version, and for the Jobs of the first namespace."""
        try:
            with Api() as api:
                version = api.call("GET", "/version").get("gitVersion")
                api.call("GET", _jobs(namespaces()[0]), params={"limit": "1"})
        except (EngineAwayError, EngineRefusedError) as error:
            return Facts(False, problem=str(error))
        return Facts(True, version)

    def check(self, new: NewRun, *, launch: bool) -> None:
        """Also refuses a run without an image, and a namespace that is not the server's."""
        super().check(new, launch=launch)
        options = options_of(KubernetesOptions, new.backend_options)
        if not _image(options):
            raise NewRunError(
                "backend_options.image", f"name the pods' image here, or in the server's {IMAGE}"
            )
        if options.namespace is not None and options.namespace not in (known := _namespaces()):
            raise NewRunError(
                "backend_options.namespace",
                f"the server may use: {', '.join(known)} ({NAMESPACES})",
            )

    def submit(self, order: Order) -> str:
        """First the Secret, then the Job, which takes it over: a second time finds the first."""
        options = order.options
        assert isinstance(options, KubernetesOptions)
        namespace = options.namespace or namespaces()[0]
        image = _image(options)
        if namespace not in namespaces():  # the web process let it pass, with other variables
            raise EngineRefusedError(f"{NAMESPACES} of the worker does not have {namespace}")
        if not image:
            raise EngineRefusedError(f"the worker has no {IMAGE}, and the run names no image")
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
        """Two lists of each namespace: its Jobs, and their pods, which say why they wait.

        Where a Job lacks pods, a third one of events says why: it was refused them.
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
        """The pods get SIGTERM, and SIGKILL after 30 s; the Job goes after them."""
        if not refs:
            return
        with Api() as api:
            for ref in refs:
                namespace, _, name = ref.partition("/")
                options = {"propagationPolicy": "Foreground"}
                api.call("DELETE", _jobs(namespace, name), options, unless=[_MISSING])
                api.call("DELETE", _secrets(namespace, name), unless=[_MISSING])

    def cordon(self, host: str, reason: str | None) -> None:
        """Marks a machine as unschedulable; see `cordon_as`."""
        self.cordon_as("", host, reason)

    def cordon_as(self, plane: str, host: str, reason: str | None) -> None:
        """Marks a machine as unschedulable, with reason and control plane as annotations.

        A cordon of somebody else stays as it is: of another control plane, and of whoever set it
        after ours was lifted by hand, which leaves the annotations.

        Raises:
            EngineAwayError: the API server does not answer.
            EngineRefusedError: there is no such machine, or the server may not cordon machines.
        """
        if not _HOST.fullmatch(host):
            raise EngineRefusedError(f"{host!r} is no name of a machine")
        with Api() as api:
            node = api.call("GET", _node(host), unless=[_MISSING] if reason is None else [])
            if node is None:  # it is gone, and its cordon with it
                return
            change = cordons.change(node, plane, reason)
            if change is not None:
                named = {"fieldManager": cordons.manager(plane)}
                api.call("PATCH", _node(host), change, params=named)


def namespaces() -> list[str]:
    """Where the server may have Jobs; the first is the default.

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
    """Makes the Secret, or makes it anew: a worker was killed before the Job was there."""
    body = manifests.secret(order)
    if api.call("POST", _secrets(namespace), body, unless=[_CONFLICT]) is None:
        change: dict[str, Any] = {"stringData": body["stringData"]}
        api.call("PATCH", _secrets(namespace, manifests.name_of(order)), change)


def _make_job(api: Api, namespace: str, order: Order, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The Job as the API server has it, now or since an earlier time."""
    job: Mapping[str, Any] | None = api.call("POST", _jobs(namespace), body, unless=[_CONFLICT])
    if job is None:
        name = manifests.name_of(order)
        job = api.call("GET", _jobs(namespace, name))
        assert job is not None
        if job["metadata"].get("labels", {}).get(manifests.LABEL) != order.label:
            raise EngineRefusedError(f"there is a Job {name} already, which is not ours")
    return job


def _refusals(api: Api, namespace: str) -> Sequence[Mapping[str, Any]]:
    """What kept Jobs from having pods; nothing if the server may not list events."""
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
