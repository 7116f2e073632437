"""Backend `kubernetes`: each job is a batch/v1 Job, whose pods are the run's nodes.

`engine` implements the operations, and `options` a run's options. `manifests` builds Jobs, Secrets
and patches, and `looking` interprets the API server's lists; both modules have only pure functions.
`api` calls the API server, with the credentials that `access` finds in a kubeconfig or in the
service account of the server's own pod
([decision 0014](../../../../docs/decisions/0014-kubernetes.md)).
"""

from paceline_backend.backends.kubernetes.engine import Kubernetes
from paceline_backend.backends.kubernetes.options import KubernetesOptions

__all__ = ["Kubernetes", "KubernetesOptions"]
