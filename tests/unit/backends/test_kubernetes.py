"""What Kubernetes is asked for, and what its lists mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline_backend import backends
from paceline_backend.backends.kubernetes import (
    Kubernetes,
    KubernetesOptions,
    looking,
    manifests,
)
from paceline_backend.backends.kubernetes.manifests import CORDON_PLANE, CORDON_REASON
from paceline_backend.store.new_runs import NewRun

NEW = NewRun(
    "train",
    "/app/train.py",
    2,
    "bsp",
    backend="kubernetes",
    nodes_min=2,
    nodes_max=4,
    backend_options={"image": "registry/train:1"},
)
OPTIONS = KubernetesOptions(
    memory="64Gi",
    gpus_per_node=8,
    node_selector={"pool": "a"},
    tolerations=[{"key": "gpu", "operator": "Exists"}],
    labels={"kueue.x-k8s.io/queue-name": "team", "paceline-run": "forged"},
    volumes={"data": "/data"},
    image_pull_secrets=["registry"],
    host_network=True,
    setup="export A=1",
)
ORDER = backends.Order(
    label="paceline.0123456789abcdef.3f9a1c07be52.2.1",
    run="3f9a1c07be52",
    nodes=2,
    nproc=4,
    cwd="/app",
    options=OPTIONS,
    server="http://paceline:8000",
    token="pl_1_secret",
)


def test_a_job() -> None:
    job = manifests.job(ORDER, OPTIONS, "registry/train:1")
    assert job["metadata"]["name"] == "paceline-3f9a1c07be52-2-1"
    assert ORDER.token not in str(job)
    assert "completions" not in job["spec"]
    assert job["spec"]["parallelism"] == 2
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert labels["paceline-run"] == ORDER.run
    assert labels["kueue.x-k8s.io/queue-name"] == "team"
    assert all(len(value) <= 63 for value in labels.values())
    pod = job["spec"]["template"]["spec"]
    assert pod["hostNetwork"]
    assert not pod["automountServiceAccountToken"]
    assert pod["nodeSelector"] == {"pool": "a"}
    [container] = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "4", "memory": "64Gi", "nvidia.com/gpu": "8"},
        "limits": {"memory": "64Gi", "nvidia.com/gpu": "8"},
    }
    assert {"name": "claim-0", "mountPath": "/data"} in container["volumeMounts"]
    script = container["command"][-1]
    assert script.index("export A=1") < script.index("exec paceline node --run 3f9a1c07be52")


def test_machines_are_avoided() -> None:
    made = manifests.job(replace(ORDER, avoid=["m1", "m2"]), OPTIONS, "train:1")
    affinity = made["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [field["values"] for field in term["matchFields"]] == [["m1"], ["m2"]]
    assert {field["operator"] for field in term["matchFields"]} == {"NotIn"}


def test_a_secret_belongs_to_its_job() -> None:
    made = manifests.secret(ORDER)
    assert made["metadata"]["name"] == manifests.name_of(ORDER)
    assert made["stringData"] == {"token": "pl_1_secret"}
    patch = manifests.owned_by({"metadata": {"name": "a", "uid": "u"}})
    [owner] = patch["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": "a", "uid": "u"}


def test_pods_with_a_service_account() -> None:
    options = KubernetesOptions(service_account="reader")
    pod = manifests.job(ORDER, options, "i")["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == "reader"
    assert "automountServiceAccountToken" not in pod
    assert "hostNetwork" not in pod


def listed(name: str, plane: str = "plane", **status: Any) -> dict[str, Any]:
    labels = {manifests.LABEL: f"paceline.{plane}.run.0.0"}
    return {"metadata": {"name": name, "namespace": "ns", "labels": labels}, "status": status}


def pod(job: str, phase: str, **status: Any) -> dict[str, Any]:
    meta = {"name": f"{job}-x", "namespace": "ns", "labels": {"job-name": job}}
    return {"metadata": meta, "status": {"phase": phase, **status}}


def met(kind: str, **words: str) -> dict[str, Any]:
    return {"type": kind, "status": "True", **words}


WAITS = {
    "type": "PodScheduled",
    "status": "False",
    "reason": "Unschedulable",
    "message": "0/2 nodes are available: 2 Insufficient cpu.",
}
PULLS = {"state": {"waiting": {"reason": "ErrImagePull", "message": "no such\nimage"}}}
KILLED = {"lastState": {"terminated": {"reason": "OOMKilled", "exitCode": 137}}}


@pytest.mark.parametrize(
    "status, pods, state, reason",
    [
        ({}, [], "queued", "it has no pod yet"),
        ({}, [pod("j", "Pending", conditions=[WAITS])], "queued", "Insufficient cpu"),
        ({}, [pod("j", "Pending", containerStatuses=[PULLS])], "queued", "ErrImagePull: no such i"),
        ({}, [pod("j", "Pending")], "queued", "its pods are starting"),
        ({"conditions": [met("Suspended", message="Job suspended")]}, [], "queued", "suspended"),
        ({}, [pod("j", "Pending"), pod("j", "Running")], "running", ""),
        ({}, [pod("j", "Succeeded"), pod("j", "Running")], "running", ""),
        ({"conditions": [met("Complete")]}, [pod("j", "Succeeded")], "ended", "Complete"),
        (
            {"conditions": [met("Complete")]},
            [pod("j", "Succeeded", containerStatuses=[KILLED | {"state": {}}])],
            "ended",
            "Complete; pod j-x: OOMKilled (exit code 137)",
        ),
        (
            {"conditions": [met("Failed", reason="DeadlineExceeded")]},
            [pod("j", "Failed", reason="Evicted", message="memory")],
            "ended",
            "Failed; DeadlineExceeded; pod j-x: Evicted: memory",
        ),
    ],
)
def test_what_a_job_does(
    status: dict[str, Any], pods: list[dict[str, Any]], state: str, reason: str
) -> None:
    other = pod("other", "Running")
    [job] = looking.jobs("paceline.plane.", [listed("j", **status)], [other, *pods])
    assert (job.ref, job.label, job.state) == ("ns/j", "paceline.plane.run.0.0", state)
    assert reason in job.reason
    assert bool(reason) == bool(job.reason)


CRASHES = {
    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
    "lastState": {"terminated": {"reason": "Error", "exitCode": 127}},
}
BACKS_OFF = {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}}


@pytest.mark.parametrize(
    "pods, state, reason",
    [
        (
            [pod("j", "Running"), pod("j", "Pending", conditions=[WAITS])],
            "queued",
            "1 of 2 pods run; Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.",
        ),
        ([pod("j", "Running")], "queued", "1 of 2 pods run; FailedCreate: exceeded quota: team"),
        ([], "queued", "FailedCreate: exceeded quota: team"),
        ([pod("j", "Running"), pod("j", "Running")], "running", ""),
        ([pod("j", "Running"), pod("j", "Succeeded")], "running", ""),  # it has left its run
        (
            # A third one in place of one that was evicted.
            [pod("j", "Running"), pod("j", "Failed"), pod("j", "Pending", conditions=[WAITS])],
            "queued",
            "1 of 2 pods run; Unschedulable: 0/2 nodes are available: 2 Insufficient cpu.",
        ),
        (
            [pod("j", "Running"), pod("j", "Failed")],
            "queued",
            "1 of 2 pods run; FailedCreate: exceeded quota: team",
        ),
        (
            [pod("j", "Running", containerStatuses=[CRASHES]), pod("j", "Pending")],
            "queued",
            "CrashLoopBackOff: back-off 10s",
        ),
        (
            [pod("j", "Running"), pod("j", "Pending", containerStatuses=[BACKS_OFF])],
            "queued",
            "1 of 2 pods run; ImagePullBackOff: Back-off pulling",
        ),
    ],
)
def test_a_job_runs_when_all_of_its_pods_have_begun(
    pods: list[dict[str, Any]], state: str, reason: str
) -> None:
    job = listed("j") | {"spec": {"parallelism": 2}}
    job["metadata"]["uid"] = "u"
    events = [
        refusal("u", "exceeded quota: team", "2026-01-01T00:00:05Z"),
        refusal("u", "an older word", "2026-01-01T00:00:01Z"),
        refusal("of another", "no such account", "2026-01-01T00:00:09Z"),
    ]
    [known] = looking.jobs("paceline.", [job], pods, events)
    assert (known.state, known.reason) == (state, reason)
    lacking = sum(each["status"]["phase"] != "Failed" for each in pods) < 2
    assert looking.lack_pods("paceline.", [job], pods) == lacking


def refusal(uid: str, message: str, at: str) -> dict[str, Any]:
    """An event of a Job that does not get a pod."""
    about = {"kind": "Job", "uid": uid}
    return {
        "involvedObject": about,
        "reason": "FailedCreate",
        "message": message,
        "lastTimestamp": at,
    }


def test_only_jobs_of_ours_that_want_pods_lack_them() -> None:
    suspended = listed("j", conditions=[met("Suspended")])
    ended = listed("j", conditions=[met("Complete")])
    other = listed("j", plane="other")
    assert not looking.lack_pods("paceline.plane.", [suspended, ended, other], [])
    assert looking.lack_pods("paceline.plane.", [suspended, listed("k")], [])


MACHINE = {"metadata": {"annotations": {}}, "spec": {}}


def machine(by: str | None, cordoned: bool = True, *managers: str) -> dict[str, Any]:
    """A machine with our annotations, as a control plane left them, and who set its cordon."""
    annotations = {CORDON_REASON: "slow"} | ({} if by is None else {CORDON_PLANE: by})
    fields = {"fieldsV1": {"f:spec": {"f:unschedulable": {}}}}
    managed: list[dict[str, Any]] = [{"manager": name, **fields} for name in managers]
    managed += [{"manager": "kubelet", "fieldsV1": {"f:status": {}}}]
    spec = {"unschedulable": True} if cordoned else {}
    return {"metadata": {"annotations": annotations, "managedFields": managed}, "spec": spec}


LIFTED = {"metadata": {"annotations": {CORDON_REASON: None, CORDON_PLANE: None}}}
SET = {
    "metadata": {"annotations": {CORDON_REASON: "slow disk", CORDON_PLANE: "a1"}},
    "spec": {"unschedulable": True},
}


@pytest.mark.parametrize(
    "node, reason, change",
    [
        (MACHINE, "slow disk", SET),
        (machine("a1"), "slow disk", SET),
        (machine("a1", True, "paceline-a1"), "slow disk", SET),
        (machine("b2", False), "slow disk", SET),  # of a control plane that is gone
        (machine("b2"), "slow disk", None),
        (machine("a1", True, "kubectl"), "slow disk", None),
        (MACHINE, None, None),
        (machine("b2"), None, None),
        (machine(None), None, None),
        (machine("a1"), None, LIFTED | {"spec": {"unschedulable": None}}),
        (machine("a1", True, "paceline-a1"), None, LIFTED | {"spec": {"unschedulable": None}}),
        (machine("a1", False), None, LIFTED | {"spec": {"unschedulable": None}}),
        # Somebody lifted ours, and cordoned the machine again.
        (machine("a1", True, "kubectl"), None, LIFTED),
    ],
)
def test_a_cordon_of_somebody_else_stays(
    node: dict[str, Any], reason: str | None, change: dict[str, Any] | None
) -> None:
    assert manifests.cordon_patch(node, "a1", reason) == change


def test_a_job_that_is_deleted_has_ended_after_its_pods() -> None:
    job = listed("j")
    job["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert looking.jobs("paceline.", [job], [pod("j", "Running")])[0].state == "running"
    [ended] = looking.jobs("paceline.", [job], [pod("j", "Succeeded")])
    assert (ended.state, ended.cancelled) == ("ended", True)


def test_jobs_of_another_control_plane() -> None:
    assert not looking.jobs("paceline.plane.", [listed("j", plane="other")], [])


@pytest.mark.parametrize(
    "options, field, words",
    [
        ({}, "backend_options.image", "PACELINE_KUBERNETES_IMAGE"),
        ({"image": "i", "namespace": "kube-system"}, "backend_options.namespace", "a, b"),
        ({"image": "i", "volumes": {"c": "data"}}, "backend_options.volumes[...]", "regex"),
        ({"image": "i", "gpus_per_node": -1}, "backend_options.gpus_per_node", ">= 0"),
        ({"image": "i", "memory": "1\n2"}, "backend_options.memory", "regex"),
        ({"kubeconfig": "/x"}, "backend_options", "the options are: server, namespace, image"),
    ],
)
def test_options_that_kubernetes_does_not_take(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], field: str, words: str
) -> None:
    monkeypatch.setenv("PACELINE_KUBERNETES_NAMESPACES", "a, b")
    monkeypatch.delenv("PACELINE_KUBERNETES_IMAGE", raising=False)
    Kubernetes().check(NEW, launch=True)
    with pytest.raises(backends.NewRunError) as refused:
        Kubernetes().check(replace(NEW, backend_options=options), launch=True)
    assert refused.value.field == field
    assert words in refused.value.message


def test_the_server_names_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_KUBERNETES_IMAGE", "registry/train:1")
    Kubernetes().check(replace(NEW, backend_options={}), launch=True)
