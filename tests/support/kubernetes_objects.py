"""What a test puts into a real Kubernetes: rights, and this machine's folders as volumes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

NAMESPACE = "paceline-runs"
USER = "paceline"  # with the rights of docker/kubernetes and no others
MANIFESTS = Path(__file__).parents[2] / "docker" / "kubernetes"


def shared_folders(*more: Path) -> list[str]:
    """The top folders of this machine that Python, its packages and the tests need."""
    needed = [*sys.path, sys.prefix, sys.base_prefix, "/usr/bin", str(MANIFESTS), *map(str, more)]
    return sorted({Path(path).resolve().parts[1] for path in needed if path})


def claims(folders: Sequence[str]) -> list[dict[str, Any]]:
    """This machine's folders as PersistentVolumes, with a claim of the namespace for each."""
    objects: list[dict[str, Any]] = []
    for folder in folders:
        size = {"storage": "1Gi"}
        shared = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
        name = f"host-{folder}"
        claim = {"name": name, "namespace": NAMESPACE}
        objects += [
            {
                "apiVersion": "v1",
                "kind": "PersistentVolume",
                "metadata": {"name": name},
                "spec": {
                    **shared,
                    "capacity": size,
                    "hostPath": {"path": f"/{folder}"},
                    "claimRef": claim,
                },
            },
            {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                "metadata": claim,
                "spec": {**shared, "resources": {"requests": size}, "volumeName": name},
            },
        ]
    return objects


def rights() -> list[dict[str, Any]]:
    """What docker/kubernetes lets the control plane do, for the user of the tests."""
    objects = []
    for name in ("rbac.yaml", "cordon.yaml"):
        for each in yaml.safe_load_all((MANIFESTS / name).read_text()):
            if "subjects" in each:
                group = "rbac.authorization.k8s.io"
                each["subjects"] = [{"kind": "User", "name": USER, "apiGroup": group}]
            objects.append(each)
    return objects
