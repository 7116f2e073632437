"""Manifests of a run's Job and Secret, and patches that cordon machines or lift a cordon.

Kubernetes 1.20 and later have all fields that these manifests use.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from paceline_backend.backends.engine import Order
from paceline_backend.backends.kubernetes.options import KubernetesOptions

# Key of the Kubernetes label whose value is the label of the `Order`.
LABEL = "paceline-label"
RUN = "paceline-run"
# Directory whose files survive restarts of the container, but not the end of the pod.
STATE = "/paceline"
POD_GRACE_S = 30
# Maximum number of failures of a Job. It is very high, because each restart of a container counts
# as a failure, and Kubernetes ends all pods of a Job that exceeds the maximum.
_BACKOFF = 1_000_000
# Seconds after which Kubernetes deletes an ended Job.
_JOB_KEPT_S = 86_400
_TOKEN = "token"
# Annotations of a machine: reason of the cordon, and id of the control plane that set it.
CORDON_REASON = "paceline-cordoned"
CORDON_PLANE = "paceline-cordoned-by"


def name_of(order: Order) -> str:
    """Return the Job's name: the label's parts, except for the control plane's id."""
    kind, _, rest = order.label.split(".", 2)
    return f"{kind}-{rest.replace('.', '-')}".lower()


def secret(order: Order) -> dict[str, Any]:
    """Return the Secret with the token of the job's nodes."""
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name_of(order), "labels": _labels(order)},
        "stringData": {_TOKEN: order.token},
    }


def owned_by(job: Mapping[str, Any]) -> dict[str, Any]:
    """Return a patch that makes `job` an object's owner, so that both are deleted together."""
    meta = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": meta["name"], "uid": meta["uid"]}
    return {"metadata": {"ownerReferences": [owner]}}


def job(order: Order, options: KubernetesOptions, image: str) -> dict[str, Any]:
    """Return the Job, in work-queue mode: it ends when all of its pods have ended."""
    labels = {**options.labels, **_labels(order)}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name_of(order), "labels": labels},
        "spec": {
            "parallelism": order.nodes,
            "backoffLimit": _BACKOFF,
            "ttlSecondsAfterFinished": _JOB_KEPT_S,
            "template": {"metadata": {"labels": labels}, "spec": _pod(order, options, image)},
        },
    }


def _labels(order: Order) -> dict[str, str]:
    return {"app.kubernetes.io/part-of": "paceline", LABEL: order.label, RUN: order.run}


def _pod(order: Order, options: KubernetesOptions, image: str) -> dict[str, Any]:
    spec: dict[str, Any] = {
        # Restart a failed container, whose script then ends with exit code 0: see `_script`.
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": POD_GRACE_S,
        # A service named "paceline" would set variables that start with PACELINE_.
        "enableServiceLinks": False,
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
    # A requirement of `matchFields` accepts only one value, so make a requirement for each machine.
    fields = [{"key": "metadata.name", "operator": "NotIn", "values": [name]} for name in machines]
    required = {"nodeSelectorTerms": [{"matchFields": fields}]}
    key = "requiredDuringSchedulingIgnoredDuringExecution"
    return {"nodeAffinity": {key: required}} if fields else {}


def _apart(order: Order) -> dict[str, Any]:
    # No two pods of a run may be on the same machine, even if they belong to different jobs.
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
            # Data loading processes use shared memory.
            {"name": "shm", "mountPath": "/dev/shm"},
            *(
                {"name": f"claim-{i}", "mountPath": path}
                for i, path in enumerate(options.volumes.values())
            ),
        ],
    }


def _script(order: Order, options: KubernetesOptions) -> str:
    """Return the script of a pod's container.

    If a pod failed, Kubernetes would replace it, or the Job would end the other pods. To prevent
    this, a pod must not fail when its processes are killed. Kubernetes restarts the container
    instead. The script then finds the file that its first start made, and ends with exit code 0.

    The kernel delivers no signal without a handler to the first process of a container, and a shell
    runs its handler only after the current command has ended. So the first process only waits, and
    forwards SIGTERM to a second process, which runs the setup and then becomes the node.
    """
    again = "its container was started before: for its log, use kubectl logs --previous"
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


def field_manager(plane: str) -> str:
    """Return a control plane's name in `managedFields`, which records who set a field."""
    return f"paceline-{plane}" if plane else "paceline"


def cordon_patch(node: Mapping[str, Any], plane: str, reason: str | None) -> dict[str, Any] | None:
    """Return a merge patch that cordons a machine, or None for no change.

    `node` is the machine as the API server returns it. Without a reason, the patch lifts the cordon
    of the control plane whose id is `plane`.
    """
    annotations = node["metadata"].get("annotations", {})
    ours = CORDON_REASON in annotations and annotations.get(CORDON_PLANE, "") == plane
    theirs = bool(node["spec"].get("unschedulable")) and (not ours or _set_by_others(node, plane))
    if reason is None:
        lifted = {"metadata": {"annotations": {CORDON_REASON: None, CORDON_PLANE: None}}}
        kept = lifted if theirs else lifted | {"spec": {"unschedulable": None}}
        return kept if ours else None
    if theirs:
        return None
    words = {CORDON_REASON: reason, CORDON_PLANE: plane or None}
    return {"metadata": {"annotations": words}, "spec": {"unschedulable": True}}


def _set_by_others(node: Mapping[str, Any], plane: str) -> bool:
    """Return True if another user cordoned the machine after Paceline's cordon was lifted by hand.

    A user who lifts the cordon by hand leaves Paceline's annotations, so only the machine's managed
    fields show who set the cordon. The result is False if the API server returns no such fields.
    """
    managers = {
        entry.get("manager")
        for entry in node["metadata"].get("managedFields", ())
        if "f:unschedulable" in entry.get("fieldsV1", {}).get("f:spec", {})
    }
    return bool(managers) and field_manager(plane) not in managers
