"""What a run's Job and its Secret look like: fields that Kubernetes has had since 1.20. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.backends.engine import Order
from paceline_backend.backends.kubernetes.options import KubernetesOptions

LABEL = "paceline-label"  # what the control plane calls the job
RUN = "paceline-run"
STATE = "/paceline"  # lasts as long as the pod
GRACE_S = 30
# Restarts of containers count towards it, and a Job that exceeds it ends all of its pods.
_BACKOFF = 1_000_000
_KEPT_S = 86_400  # an ended Job
_TOKEN = "token"


def name_of(order: Order) -> str:
    """The Job's name: the label without the control plane, so the same label has no other name."""
    kind, _, rest = order.label.split(".", 2)
    return f"{kind}-{rest.replace('.', '-')}".lower()


def secret(order: Order) -> dict[str, Any]:
    """What only the pods and those who may read the namespace's Secrets see."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name_of(order), "labels": _labels(order)},
        "stringData": {_TOKEN: order.token},
    }


def owned_by(job: Mapping[str, Any]) -> dict[str, Any]:
    """A patch of something that goes when the Job goes."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def job(order: Order, options: KubernetesOptions, image: str) -> dict[str, Any]:
    """The Job, in work-queue mode: it ends when all of its pods have ended."""
    labels = {**options.labels, **_labels(order)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(order), "labels": labels},
        "spec": {
            "parallelism": order.nodes,
            "backoffLimit": _BACKOFF,
            "ttlSecondsAfterFinished": _KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": _pod(order, options, image)},
        },
    }


def _labels(order: Order) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "paceline", LABEL: order.label, RUN: order.run}


def _pod(order: Order, options: KubernetesOptions, image: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        # The container that is started again ends at once: see `_script`.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE_S,
        "enableServiceLinks": False,  # a service "paceline" would set variables of ours
        "containers": [_container(order, options, image)],
        "volumes": [
            {"name": "state", "emptyDir": {}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
            *(
                {"name": f"claim-{i}", "persistentVolumeClaim": {"claimName": claim}}
                for i, claim in enumerate(options.volumes)
            ),
        ],
        "affinity": {"podAntiAffinity": _apart(order), **_away_from(order.avoid)},
        "nodeSelector": options.node_selector,
        "tolerations": options.tolerations,
        "imagePullSecrets": [{"name": name} for name in options.image_pull_secrets],
    }
    if options.service_account is None:
        spec["automountServiceAccountToken"] = False
    else:
        spec["serviceAccountName"] = options.service_account
    if options.host_network:
        spec |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    return spec


def _away_from(machines: Sequence[str]) -> dict[str, Any]:
    """Not on these machines; a requirement on the name takes one of them."""
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in machines]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"nodeAffinity": {key: required}} if fields else {}


def _apart(order: Order) -> dict[str, Any]:
    """Each of a run's pods is on another machine, also pods of different jobs."""
    term = {
        "labelSelector": {"matchLabels": {RUN: order.run}},
        "topologyKey": "kubernetes.io/hostname",
    }
    return {"requiredDuringSchedulingIgnoredDuringExecution": [term]}


def _container(order: Order, options: KubernetesOptions, image: str) -> dict[str, Any]:
    amounts = {"cpu": str(options.cpus_per_node or order.nproc)}
    limits = {}
    if options.memory is not None:
        limits["memory"] = options.memory
    if options.gpus_per_node:
        limits[options.gpu_resource] = str(options.gpus_per_node)
    token = {"secretKeyRef": {"name": name_of(order), "key": _TOKEN}}
    return {
        "name": "node",
        "image": image,
        "command": ["/bin/sh", "-c", _script(order, options)],
        "workingDir": order.cwd,
        "env": [
            {"name": "PACELINE_SERVER", "value": order.server},
            {"name": "PACELINE_TOKEN", "valueFrom": token},
            {"name": "PACELINE_DATA", "value": f"{STATE}/data"},
            {"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        ],
        "resources": {"requests": amounts | limits, "limits": limits},
        "volumeMounts": [
            {"name": "state", "mountPath": STATE},
            {"name": "shm", "mountPath": "/dev/shm"},  # data loading processes use it
            *(
                {"name": f"claim-{i}", "mountPath": path}
                for i, path in enumerate(options.volumes.values())
            ),
        ],
    }


def _script(order: Order, options: KubernetesOptions) -> str:
    """What a pod's container runs.

    A pod that fails would be replaced, or the Job would end the others. So a container whose
    processes were killed is started again, and ends well: then Kubernetes starts no further pod.

    The first process of a container does not die of a signal that it has no handler for, and a
    shell heeds its handler only once the command that it runs has ended. So the first process only
    waits, and hands SIGTERM on to the one with the setup, which becomes the node.
    """
    again = "its container was started before: the log is that of kubectl logs --previous"
    node = f'exec {options.paceline} node --run {order.run} --slot "$POD_NAME" --host "$NODE_NAME"'
    lines = [options.setup, node]
    return f"""\
if [ -e {STATE}/begun ]; then echo {shlex.quote(again)}; exit 0; fi
: > {STATE}/begun
trap 'exit 143' TERM
/bin/sh -c {shlex.quote(chr(10).join(line for line in lines if line))} &
node=$!
trap 'kill -TERM "$node"' TERM
while :; do
  wait "$node"
  code=$?
  kill -0 "$node" 2>/dev/null || exit "$code"
done
"""
