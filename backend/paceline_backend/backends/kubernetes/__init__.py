"""Runs on Kubernetes: each of our jobs is a batch/v1 Job, whose pods are the run's nodes.

`engine` has the verbs, `options` what a run may ask for. `manifests` says what a Job and its Secret
look like, and `looking` what the API server's lists mean: both are pure. `api` asks the API server,
with what `access` finds in a kubeconfig or in the service account of the server's own pod
([decision 0014](../../../../docs/decisions/0014-kubernetes.md)).
"""

from paceline_backend.backends.kubernetes.engine import Kubernetes
from paceline_backend.backends.kubernetes.options import KubernetesOptions

__all__ = ["Kubernetes", "KubernetesOptions"]
