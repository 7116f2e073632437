"""What a machine of a Kubernetes for tests needs: configurations and images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from support.images import write_image

IMAGE = "paceline.local/host:1"
PAUSE = "paceline.local/pause:1"

_CONTAINERD = """
version = 2
root = "{folder}/root"
state = "{folder}/state"
[grpc]
  address = "{folder}/c.sock"
[ttrpc]
  address = "{folder}/t.sock"
[plugins."io.containerd.grpc.v1.cri"]
  restrict_oom_score_adj = true
  sandbox_image = "{pause}"
  [plugins."io.containerd.grpc.v1.cri".cni]
    conf_dir = "{folder}/cni"
    bin_dir = "/usr/lib/cni"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
"""


def containerd(folder: Path) -> str:
    """The configuration of a containerd that writes below a folder only."""
    return _CONTAINERD.format(folder=folder, pause=PAUSE)


def kubelet(address: str) -> Mapping[str, Any]:
    """The configuration of a kubelet, which serves at this address."""
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": False,
        "enforceNodeAllocatable": [],
        "failSwapOn": False,
        "healthzPort": 0,
        "address": address,
        "nodeStatusUpdateFrequency": "2s",
        "evictionHard": {"memory.available": "1Mi"},
        "imageGCHighThresholdPercent": 100,
    }


def images(folder: Path, program: Path) -> Sequence[Path]:
    """Archives of two images, which are made once.

    The pods' image has little: they mount this machine's folders. The other holds a pod.
    """
    host, pause = folder / "host.tar", folder / "pause.tar"
    if not host.exists():
        root = Path("/")
        known = ("etc/passwd", "etc/group", "etc/ld.so.cache", "etc/nsswitch.conf")
        files = {name: (root / name).read_bytes() for name in known if (root / name).exists()}
        links = {
            name: str((root / name).readlink())
            for name in ("bin", "sbin", "lib", "lib64")
            if (root / name).is_symlink()
        }
        write_image(host, IMAGE, files, links=links, folders=["usr", "tmp", "etc"])
        write_image(pause, PAUSE, {"pause": program.read_bytes()}, command=["/pause"])
    return host, pause
