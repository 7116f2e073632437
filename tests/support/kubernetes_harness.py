"""A control plane beside a real Kubernetes, for the contract of engines."""

from __future__ import annotations

import json
import re
import signal
import sys
from contextlib import suppress
from typing import Any

import psutil

from paceline_backend.backends.kubernetes.manifests import LABEL
from support.kubernetes import Kubernetes
from support.kubernetes_machine import IMAGE, PAUSE
from support.kubernetes_objects import NAMESPACE, shared_folders
from support.machines import Cluster
from support.waiting import until


class KubernetesHarness:
    """A Kubernetes of two machines for the contract."""

    backend = "kubernetes"

    def __init__(self, cluster: Cluster, daemons: Kubernetes) -> None:
        self.cluster = cluster
        self.kubernetes = daemons

    def options(self) -> dict[str, Any]:
        folders = shared_folders(self.cluster.folder)
        return {
            "image": IMAGE,
            "volumes": {f"host-{folder}": f"/{folder}" for folder in folders},
            "host_network": True,
            "setup": f"export PACELINE_DATA={self.cluster.folder / 'data'}",
            "paceline": f"{sys.executable} -P -m paceline",
        }

    def jobs(self) -> list[str]:
        jobs = self.kubernetes.get("jobs", "--selector", LABEL)
        left = [job for job in jobs if not job["status"].get("conditions")]
        left.sort(key=lambda job: str(job["metadata"]["creationTimestamp"]))
        return [f"{NAMESPACE}/{job['metadata']['name']}" for job in left]

    def occupy(self) -> None:
        nodes = json.loads(self.kubernetes.ask("get", "nodes", "--output=json"))["items"]
        self.kubernetes.apply(*(_occupant(node) for node in nodes))

        def taken() -> bool:
            pods = self.kubernetes.get("pods", "--selector", "occupies")
            return [pod["status"]["phase"] for pod in pods] == ["Running"] * len(nodes)

        until(taken, "occupied nodes", 180, 0.1)

    def free(self) -> None:
        words = ("delete", "pods", "--selector", "occupies", "--grace-period=1")
        self.kubernetes.ask(*words, "--namespace", NAMESPACE)

    def cancel(self, job: str) -> None:
        self.kubernetes.ask("delete", "job", _name(job), "--namespace", NAMESPACE)

    def duplicate(self, job: str) -> None:
        [copy] = [each for each in self.kubernetes.get("jobs") if _name(job) == named(each)]
        copy["metadata"] = {"name": f"{_name(job)}-copy", "labels": copy["metadata"]["labels"]}
        del copy["spec"]["selector"], copy["status"]
        template = copy["spec"]["template"]["metadata"]
        for label in ("controller-uid", "job-name"):
            template["labels"].pop(label)
        self.kubernetes.apply(copy, verb="create")

    def kill_nodes(self, job: str) -> None:
        self.kill_pods(re.escape(_name(job)) + "-[a-z0-9]{5}")

    def kill_pods(self, name: str) -> None:
        """Ends the processes of the pods whose names match."""
        pod = re.compile(name)
        killed = 0
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if pod.fullmatch(process.environ().get("POD_NAME", "")):
                    process.send_signal(signal.SIGKILL)
                    killed += 1
        assert killed

    def vanish(self) -> None:
        self.kubernetes.stop("kube-apiserver")

    def come_back(self) -> None:
        self.kubernetes.start_api()

    def secrets_seen(self, job: str) -> str:
        where = ("--namespace", NAMESPACE)
        seen = [
            self.kubernetes.ask("get", "jobs,pods,events", "--output=json", *where),
            self.kubernetes.ask("describe", "job", _name(job), *where),
        ]
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                seen.append(" ".join(process.cmdline()))
        return "\n".join(seen)


def _occupant(node: dict[str, Any]) -> dict[str, Any]:
    """A pod that takes all processors of a machine."""
    taken = {"cpu": node["status"]["allocatable"]["cpu"]}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"occupant-{named(node)}", "labels": {"occupies": "a-node"}},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": named(node)},
            "hostNetwork": True,
            "containers": [{"name": "c", "image": PAUSE, "resources": {"requests": taken}}],
        },
    }


def _name(job: str) -> str:
    return job.partition("/")[2]


def named(object_: dict[str, Any]) -> str:
    return str(object_["metadata"]["name"])
