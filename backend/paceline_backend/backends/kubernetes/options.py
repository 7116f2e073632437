"""Options of runs on Kubernetes."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from paceline_backend.backends.engine import EngineOptions, Word

Directory = Annotated[str, Meta(pattern=r"^/[^\x00-\x1f:]*$", max_length=1000)]
Toleration = dict[Word, Word | int]


class KubernetesOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options of a run on Kubernetes. The cluster's defaults apply to missing options."""

    namespace: (
        Annotated[
            Word,
            Meta(description="namespace of the Job; default: the first that the server may use"),
        ]
        | None
    ) = None
    image: (
        Annotated[Word, Meta(description="image of the pods; default: PACELINE_KUBERNETES_IMAGE")]
        | None
    ) = None
    cpus_per_node: (
        Annotated[
            int, Meta(ge=1, le=100_000, description="CPUs of each node; default: one per rank")
        ]
        | None
    ) = None
    gpus_per_node: Annotated[
        int, Meta(ge=0, le=1000, description="GPUs of each node, requested as `gpu_resource`")
    ] = 0
    gpu_resource: Annotated[Word, Meta(description="name of the GPU resource in the cluster")] = (
        "nvidia.com/gpu"
    )
    memory: Annotated[Word, Meta(description="memory of each node, such as 64Gi")] | None = None
    node_selector: Annotated[
        dict[Word, Word],
        Meta(description="labels that the pods' machines must have", max_length=100),
    ] = msgspec.field(default_factory=dict)
    tolerations: Annotated[
        list[Toleration],
        Meta(description="the pods' tolerations, as in a pod spec", max_length=100),
    ] = msgspec.field(default_factory=list)
    labels: Annotated[
        dict[Word, Word], Meta(description="further labels of the Job and its pods", max_length=100)
    ] = msgspec.field(default_factory=dict)
    service_account: (
        Annotated[
            Word, Meta(description="service account of the pods; default: no access to the cluster")
        ]
        | None
    ) = None
    volumes: Annotated[
        dict[Word, Directory],
        Meta(
            description="names of PersistentVolumeClaims, with the path at which pods mount each",
            max_length=100,
        ),
    ] = msgspec.field(default_factory=dict)
    image_pull_secrets: Annotated[
        list[Word],
        Meta(description="names of the Secrets with which the image is pulled", max_length=100),
    ] = msgspec.field(default_factory=list)
    host_network: Annotated[
        bool, Meta(description="use the machines' network, for example for NCCL over InfiniBand")
    ] = False
    setup: Annotated[
        str,
        Meta(
            description="shell commands to run in each pod before its node starts",
            pattern=r"^[^\x00]*$",
            max_length=10_000,
        ),
    ] = ""
    paceline: Annotated[Word, Meta(description="command that runs `paceline` in the image")] = (
        "paceline"
    )
