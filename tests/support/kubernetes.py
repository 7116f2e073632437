"""A real Kubernetes on a network of namespaces: a control plane, and a kubelet on each node."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from support import kubernetes_machine as machine
from support.daemons import Daemons
from support.kubernetes_objects import NAMESPACE, USER, claims, rights, shared_folders
from support.network import Network
from support.waiting import until

_CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
BIN = Path(os.environ.get("PACELINE_KUBERNETES_BIN") or _CACHE / "paceline" / "kubernetes")
BUILT = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
MISSING = [
    *(name for name in (*BUILT, "pause") if not (BIN / name).exists()),
    *(name for name in ("etcd", "containerd", "ctr", "runc", "openssl") if not shutil.which(name)),
]

# A kubelet changes these of the whole machine.
_SET_BY_KUBELET = [
    Path("/proc/sys", name)
    for name in ("vm/overcommit_memory", "kernel/panic", "kernel/panic_on_oops")
]


class Kubernetes(Daemons):
    """The daemons. Pods go on where some of them end.

    Args:
        network: each of its nodes is a machine of the cluster. Pods use their network.
        folder: for everything that they write; a short path, as sockets are in it.
    """

    def __init__(self, network: Network, folder: Path) -> None:
        super().__init__(folder)
        self._network = network
        self._url = f"https://{network.head}:6443"
        self._tokens = {name: secrets.token_hex(16) for name in ("admin", USER)}
        self.configuration = folder / USER  # a kubeconfig
        self._pki = folder / "pki"

    def start(self) -> None:
        """Starts all daemons, and waits until the nodes are ready."""
        self._pki.mkdir(parents=True)
        self._write_keys()
        etcd = ("http://127.0.0.1:2379", "http://127.0.0.1:2380")
        self._spawn(
            "etcd",
            [
                *("etcd", "--data-dir", str(self._folder / "etcd"), "--unsafe-no-fsync"),
                *("--listen-client-urls", etcd[0], "--advertise-client-urls", etcd[0]),
                *("--listen-peer-urls", etcd[1], "--initial-advertise-peer-urls", etcd[1]),
                *("--initial-cluster", f"default={etcd[1]}"),
            ],
        )
        self.start_api()
        for name in self._tokens:
            self._write_kubeconfig(name)
        admin = ("--kubeconfig", str(self._folder / "admin"), "--leader-elect=false", "--port=0")
        for number, name in enumerate(("kube-controller-manager", "kube-scheduler")):
            where = ("--bind-address=127.0.0.1", f"--secure-port={16444 + number}")
            more = [f"--cert-dir={self._pki / name}"]
            if name == "kube-controller-manager":
                more += ["--node-monitor-grace-period=300s"]  # a busy machine is no lost node
            self._spawn(name, [str(BIN / name), *admin, *where, *more])
        for node in range(1, self._network.nodes + 1):
            self._start_node(node)
        until(self._ready, "ready nodes", 180, 0.2)

    def start_api(self) -> None:
        """Starts the API server, again with what etcd has."""
        self._spawn(
            "kube-apiserver",
            [
                str(BIN / "kube-apiserver"),
                "--etcd-servers=http://127.0.0.1:2379",
                "--secure-port=6443",
                f"--advertise-address={self._network.head}",
                f"--cert-dir={self._pki}",
                f"--token-auth-file={self._pki / 'tokens.csv'}",
                "--authorization-mode=RBAC,Node",
                f"--service-account-key-file={self._pki / 'sa.pub'}",
                f"--service-account-signing-key-file={self._pki / 'sa.key'}",
                "--service-account-issuer=https://paceline.local",
                "--service-cluster-ip-range=10.96.0.0/16",
                "--disable-admission-plugins=ServiceAccount",
            ],
        )
        until((self._pki / "apiserver.crt").exists, "the API server's certificate", 120, 0.1)
        self._write_kubeconfig("admin")
        until(lambda: self._asked("get", "--raw", "/readyz").returncode == 0, "kube-apiserver", 180)

    def ask(self, *words: str, text: str = "") -> str:
        """What `kubectl` prints for an admin."""
        done = self._asked(*words, text=text)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def get(self, *words: str) -> list[dict[str, Any]]:
        """What `kubectl get` lists in the namespace."""
        items: list[dict[str, Any]] = json.loads(
            self.ask("get", *words, "--namespace", NAMESPACE, "--output=json")
        )["items"]
        return items

    def apply(self, *objects: Mapping[str, Any], verb: str = "apply") -> None:
        text = json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        self.ask(verb, "--namespace", NAMESPACE, "--filename=-", text=text)

    def grant(self) -> None:
        """Gives the control plane's user the rights of docker/kubernetes."""
        self.ask("apply", "--filename=-", text=yaml.safe_dump_all(rights()))

    def clean(self) -> None:
        """Ends all Jobs, and starts the API server if it is away."""
        if "kube-apiserver" not in self.processes:
            self.start_api()
        where = ("--namespace", NAMESPACE, "--all", "--ignore-not-found", "--wait=false")
        self.ask("delete", "jobs", *where)
        self.ask("delete", "pods", *where, "--grace-period=1")
        until(lambda: not self.get("pods,jobs"), "the end of all pods", 180, 0.2)

    def _asked(self, *words: str, text: str = "") -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / "kubectl"), "--kubeconfig", str(self._folder / "admin"), *words],
            input=text,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def _ready(self) -> bool:
        nodes = json.loads(self.ask("get", "nodes", "--output=json"))["items"]
        conditions = [each for node in nodes for each in node["status"]["conditions"]]
        ready = [each for each in conditions if each["type"] == "Ready"]
        return [each["status"] for each in ready] == ["True"] * self._network.nodes

    def _start_node(self, node: int) -> None:
        name = self._network.name(node)
        folder = self._folder / str(node)
        (folder / "cni").mkdir(parents=True)
        (folder / "cni" / "lo.conf").write_text(
            '{"cniVersion": "0.3.1", "name": "lo", "type": "loopback"}'
        )
        configuration = folder / "containerd.toml"
        configuration.write_text(machine.containerd(folder))
        self._spawn(f"containerd-{node}", ["containerd", "-c", str(configuration)], name)
        ctr = ["ctr", "--address", str(folder / "c.sock"), "--namespace", "k8s.io"]

        def answers() -> bool:
            return (
                subprocess.run([*ctr, "version"], capture_output=True, check=False).returncode == 0
            )

        until(answers, f"containerd on {name}", 120, 0.1)
        for image in machine.images(self._folder, BIN / "pause"):
            words = [*ctr, "images", "import", "--snapshotter", "native", str(image)]
            subprocess.run(words, check=True, capture_output=True)
        kubelet = folder / "kubelet.yaml"
        kubelet.write_text(yaml.safe_dump(machine.kubelet(self._network.address(node))))
        self._spawn(
            f"kubelet-{node}",
            [
                str(BIN / "kubelet"),
                f"--config={kubelet}",
                f"--kubeconfig={self._folder / 'admin'}",
                f"--hostname-override={name}",
                f"--node-ip={self._network.address(node)}",
                f"--root-dir={folder / 'kubelet'}",
                f"--cert-dir={folder / 'pki'}",
                "--container-runtime=remote",
                f"--container-runtime-endpoint=unix://{folder / 'c.sock'}",
            ],
            name,
        )

    def _write_keys(self) -> None:
        key, public = str(self._pki / "sa.key"), str(self._pki / "sa.pub")
        for words in (f"genrsa -out {key} 2048", f"rsa -in {key} -pubout -out {public}"):
            subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
        group = {"admin": "system:masters", USER: "users"}
        tokens = self._tokens.items()
        lines = [f"{token},{name},{name},{group[name]}\n" for name, token in tokens]
        (self._pki / "tokens.csv").write_text("".join(lines))

    def _write_kubeconfig(self, name: str) -> None:
        authority = str(self._pki / "apiserver.crt")
        cluster = {"server": self._url, "certificate-authority": authority}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": name, "user": {"token": self._tokens[name]}}],
            "contexts": [
                {"name": "x", "context": {"cluster": "c", "user": name, "namespace": NAMESPACE}}
            ],
            "current-context": "x",
        }
        (self._folder / name).write_text(yaml.safe_dump(content))

    def _spawn(self, name: str, command: Sequence[str], node: str = "") -> None:
        if node:
            # Not `ip netns exec`: it hides /sys/fs/cgroup.
            inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', node]
            command = ["nsenter", f"--net=/run/netns/{node}", *inside, *command]
        super()._spawn(name, command)


@contextlib.contextmanager
def kubernetes(network: Network, folder: Path, *more: Path) -> Iterator[Kubernetes]:
    """Kubernetes on a network, until the end of the block.

    Args:
        folder: for what the daemons write.
        more: folders that pods need beside Python's.
    """
    made = Kubernetes(network, folder)
    kernel = {path: path.read_text() for path in _SET_BY_KUBELET}
    try:
        made.start()
        made.ask("create", "namespace", NAMESPACE)
        made.ask("create", "namespace", "paceline")
        made.grant()
        made.apply(*claims(shared_folders(*more)))
        until(lambda: _bound(made), "bound volumes", 120, 0.2)
        yield made
        made.clean()
    finally:
        made.stop()
        _end_containers(folder)
        for path, value in kernel.items():
            path.write_text(value)


def _bound(cluster: Kubernetes) -> bool:
    return all(each["status"].get("phase") == "Bound" for each in cluster.get("pvc"))


def _end_containers(folder: Path) -> None:
    """Ends what is left of containers, which outlive containerd, and takes their mounts away."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (path / "cmdline").read_bytes().split(b"\0")
            if any(word.startswith(bytes(folder)) for word in words):
                os.kill(int(path.name), signal.SIGKILL)
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for mount in reversed([each for each in mounts if each.startswith(f"{folder}/")]):
        subprocess.run(["umount", "--lazy", mount], check=False, capture_output=True)
    for logs in Path("/var/log/pods").glob(f"{NAMESPACE}_*"):  # no option moves them
        shutil.rmtree(logs, ignore_errors=True)
    for link in Path("/var/log/containers").glob(f"*_{NAMESPACE}_*"):
        link.unlink(missing_ok=True)
