"""Runs on a real Kubernetes: a cluster of two machines, which are network namespaces."""

from __future__ import annotations

import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.core.errors import InputError
from paceline_backend import backends
from paceline_backend.backends.kubernetes import Kubernetes as Engine
from paceline_backend.backends.kubernetes import KubernetesOptions
from paceline_backend.backends.kubernetes.manifests import CORDON_REASON, LABEL
from paceline_backend.testing.engines import EngineContract
from support.kubernetes import (
    BIN,
    MISSING,
    kubernetes,
)
from support.kubernetes_harness import KubernetesHarness, named
from support.kubernetes_machine import IMAGE
from support.kubernetes_objects import MANIFESTS, NAMESPACE
from support.machines import NEEDS_NETWORKS, Cluster
from support.network import network
from support.waiting import until

pytestmark = [
    pytest.mark.long,
    *NEEDS_NETWORKS,
    pytest.mark.skipif(
        bool(MISSING), reason=f"make kubernetes builds it in {BIN}: missing {', '.join(MISSING)}"
    ),
]


@pytest.fixture(scope="module")
def shared_harness(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesHarness]:
    """Of all tests: it takes seconds to start."""
    folder = tmp_path_factory.mktemp("kubernetes")
    # Sockets are below it, whose paths are at most 107 letters long.
    daemons_folder = Path(tempfile.mkdtemp(prefix="k8s-"))
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            network(2) as nodes,
            kubernetes(nodes, daemons_folder, folder) as daemons,
        ):
            patch.setenv("KUBECONFIG", str(daemons.configuration))
            with Cluster(nodes, folder) as cluster:
                yield KubernetesHarness(cluster, daemons)
    finally:
        if str(daemons_folder) not in Path("/proc/self/mounts").read_text():
            shutil.rmtree(daemons_folder)


@pytest.fixture
def harness(shared_harness: KubernetesHarness) -> KubernetesHarness:
    """Without what a test before has left."""
    shared_harness.kubernetes.clean()
    return shared_harness


class TestKubernetes(EngineContract):
    """What each engine has to do."""


def order(nodes: int, **options: Any) -> backends.Order:
    """A job whose pods only wait."""
    run = secrets.token_hex(6)
    label = f"paceline.test.{run}.0.0"
    given = {"image": IMAGE, "volumes": {"host-usr": "/usr"}, **options}
    wanted = KubernetesOptions(host_network=True, paceline="sleep 3000;", **given)
    return backends.Order(label, run, nodes, 1, "/tmp", wanted, "http://nobody:1", "pl_1_secret")


def look(label: str) -> backends.Job:
    [job] = Engine().look(label)
    return job


def test_a_pod_that_is_killed_ends_no_other_and_is_not_replaced(
    harness: KubernetesHarness,
) -> None:
    asked = order(2)
    ref = Engine().submit(asked)
    assert Engine().submit(asked) == ref
    pods = wait_for_phases(harness, asked, "Running", "Running")
    assert len({pod["spec"]["nodeName"] for pod in pods}) == 2
    harness.kill_pods(named(pods[0]))
    assert len(wait_for_phases(harness, asked, "Running", "Succeeded")) == 2
    assert look(asked.label) == backends.Job(asked.label, ref, "running")
    harness.kill_pods(named(pods[1]))
    until(lambda: look(asked.label).state == "ended", "the job's end", 180, 0.1)
    assert "exit code 137" in look(asked.label).reason
    assert len(pods_of(harness, asked)) == 2


def test_a_pod_that_is_taken_away_is_replaced(harness: KubernetesHarness) -> None:
    """By Kubernetes: the new pod asks the control plane, which lets it join or go."""
    asked = order(1)
    Engine().submit(asked)
    [pod] = wait_for_phases(harness, asked, "Running")
    words = ("delete", "pod", named(pod), "--grace-period=1", "--namespace", NAMESPACE)
    harness.kubernetes.ask(*words)
    [other] = wait_for_phases(harness, asked, "Running")
    assert named(other) != named(pod)
    assert look(asked.label).state == "running"


def test_what_belongs_to_a_job_goes_with_it(harness: KubernetesHarness) -> None:
    def owned() -> list[str]:
        return [named(each) for each in harness.kubernetes.get("secrets,jobs,pods", "-l", LABEL)]

    for stops in (True, False):
        asked = order(1)
        ref = Engine().submit(asked)
        wait_for_phases(harness, asked, "Running")
        assert len(owned()) == 3
        if stops:
            Engine().stop([ref])
            Engine().stop([ref])
        else:
            harness.cancel(ref)
        until(lambda: not owned(), "the end of Job, pod and Secret", 180, 0.1)
    assert not Engine().look(asked.label)


def test_an_image_that_nobody_has(harness: KubernetesHarness) -> None:
    asked = order(1, image="paceline.local/none:1")
    Engine().submit(asked)
    until(lambda: "Image" in look(asked.label).reason, "the kubelet's words", 180, 0.2)
    assert look(asked.label).state == "queued"


def test_what_kubernetes_refuses_fails_the_run(harness: KubernetesHarness) -> None:
    with pytest.raises(InputError, match=r"backend_options.namespace"):
        harness.cluster.api("POST", "/runs", body(namespace="kube-system"))
    run = str(harness.cluster.api("POST", "/runs", body(memory="much"))["id"])
    ended = harness.cluster.ends(run)
    assert ended["state"] == "failed"
    assert "quantities" in ended["message"]
    assert not harness.jobs()


def test_a_machine_is_cordoned(harness: KubernetesHarness) -> None:
    host = harness.cluster.network.name(1)

    def node() -> dict[str, Any]:
        shown: dict[str, Any] = json.loads(harness.kubernetes.ask("get", "node", host, "-o=json"))
        return shown

    for _ in range(2):
        Engine().cordon(host, "ada: 1.8 times slower")
        assert node()["spec"]["unschedulable"]
        assert node()["metadata"]["annotations"][CORDON_REASON] == "ada: 1.8 times slower"
    assert "1.8 times slower" in harness.kubernetes.ask("describe", "node", host)
    for _ in range(2):
        Engine().cordon(host, None)
        assert "unschedulable" not in node()["spec"]
        assert CORDON_REASON not in node()["metadata"]["annotations"]
    harness.kubernetes.ask("cordon", host)
    Engine().cordon(host, None)
    assert node()["spec"]["unschedulable"]
    harness.kubernetes.ask("uncordon", host)
    with pytest.raises(backends.EngineRefusedError, match="not found"):
        Engine().cordon("nobody", "slow")
    harness.kubernetes.ask("delete", "clusterrolebinding", "paceline-cordon")
    try:
        with pytest.raises(backends.EngineRefusedError, match="forbidden"):
            Engine().cordon(host, "slow")
    finally:
        harness.kubernetes.grant()


def test_the_manifests_of_the_control_plane(harness: KubernetesHarness) -> None:
    for path in sorted(MANIFESTS.glob("*.yaml")):
        if path.name != "kustomization.yaml":
            words = ("apply", "--dry-run=server", "--filename", str(path))
            assert "(server dry run)" in harness.kubernetes.ask(*words)
    assert "kind: Deployment" in harness.kubernetes.ask("kustomize", str(MANIFESTS))


def pods_of(harness: KubernetesHarness, asked: backends.Order) -> list[dict[str, Any]]:
    return harness.kubernetes.get("pods", "--selector", f"paceline-run={asked.run}")


def wait_for_phases(
    harness: KubernetesHarness, asked: backends.Order, *phases: str
) -> list[dict[str, Any]]:
    """Waits until a job's pods are in these phases; the pods."""

    def there() -> bool:
        pods = pods_of(harness, asked)
        return sorted(pod["status"]["phase"] for pod in pods) == sorted(phases)

    until(there, f"pods that are {phases}", 180, 0.1)
    return pods_of(harness, asked)


def body(**options: Any) -> dict[str, Any]:
    """A run whose script no pod has."""
    script = str(Path(__file__).parent / "nothing.py")
    given = {"image": IMAGE, **options}
    return {"script": script, "nproc": 1, "backend": "kubernetes", "backend_options": given}
