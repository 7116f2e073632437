"""Interpretation of the API server's lists of Jobs, pods and events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from paceline_backend.backends.engine import Job
from paceline_backend.backends.kubernetes.manifests import LABEL

_ENDED = ("Complete", "Failed")


def jobs(
    prefix: str,
    listed: Sequence[Mapping[str, Any]],
    pods: Sequence[Mapping[str, Any]],
    events: Sequence[Mapping[str, Any]] = (),
) -> list[Job]:
    """Return the Jobs whose label starts with `prefix`.

    `listed` are the API server's Jobs with a label of Paceline, and `pods` are their pods. `events`
    are events that give reasons why pods could not be created.
    """
    refusals = _refusals(events)
    return [_job(job, own, refusals) for job, own in _with_pods(prefix, listed, pods)]


def lack_pods(
    prefix: str, listed: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> bool:
    """Return True if a Job has fewer pods than it should have; events may then give the reason."""
    return any(
        len(_present(own)) < _parallelism(job) and not {*_ENDED, "Suspended"} & _true(job).keys()
        for job, own in _with_pods(prefix, listed, pods)
    )


def _with_pods(
    prefix: str, listed: Sequence[Mapping[str, Any]], pods: Sequence[Mapping[str, Any]]
) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    of_job: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for pod in pods:
        meta = pod["metadata"]
        of_job[meta["namespace"], meta["labels"].get("job-name", "")].append(pod)
    for job in listed:
        if job["metadata"]["labels"][LABEL].startswith(prefix):
            yield job, of_job[job["metadata"]["namespace"], job["metadata"]["name"]]


def _job(
    job: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], refusals: Mapping[str, str]
) -> Job:
    # A Job counts as running once all of its pods have started, because a node alone would wait for
    # the other nodes, and then fail.
    meta = job["metadata"]
    label, ref = str(meta["labels"][LABEL]), f"{meta['namespace']}/{meta['name']}"
    present = _present(pods)
    waiting = [pod for pod in pods if _waits(pod)]
    running = [pod for pod in pods if pod["status"].get("phase") == "Running" and not _waits(pod)]
    conditions = _true(job)
    ended = next((conditions[kind] for kind in _ENDED if kind in conditions), None)
    ends = ended is not None or "deletionTimestamp" in meta
    lacks = len(present) < _parallelism(job)
    if running and (ends or len(present) - len(waiting) >= _parallelism(job)):
        return Job(label, ref, "running")
    if ended is not None:
        return Job(label, ref, "ended", _end(ended, pods))
    if ends and not waiting:
        return Job(label, ref, "ended", "it was deleted", cancelled=True)
    refusal = refusals.get(str(meta.get("uid")), "") if lacks else ""
    why = _why(conditions, waiting, refusal)
    some = f"{len(running)} of {_parallelism(job)} pods run; " if running else ""
    return Job(label, ref, "queued", f"{some}{why}")


def _parallelism(job: Mapping[str, Any]) -> int:
    return int(job.get("spec", {}).get("parallelism", 1))


def _present(pods: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    # Kubernetes replaces failed pods, so they do not count.
    return [pod for pod in pods if pod["status"].get("phase") != "Failed"]


def _waits(pod: Mapping[str, Any]) -> bool:
    # A pod in phase Running can also wait, to restart a container that has failed.
    status = pod["status"]
    waiting = (each.get("state", {}).get("waiting") for each in _containers(pod))
    return status.get("phase") == "Pending" or (status.get("phase") == "Running" and any(waiting))


def _containers(pod: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    return pod["status"].get("containerStatuses") or ()


def _refusals(events: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the newest reason why a Job did not get a pod, by the Job's uid."""
    in_order = sorted(events, key=lambda event: event.get("lastTimestamp") or "")
    return {event["involvedObject"].get("uid"): _words(event) for event in in_order}


def _true(object_: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return an object's conditions that have the status True, by type."""
    return {
        condition["type"]: condition
        for condition in object_.get("status", {}).get("conditions") or ()
        if condition["status"] == "True"
    }


def _why(conditions: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], refusal: str) -> str:
    """Return the reason why pods of a Job do not run, in Kubernetes' words."""
    if "Suspended" in conditions:
        return _words(conditions["Suspended"])
    reasons = [reason for pod in pods for reason in _reasons(pod)]
    unknown = "its pods are starting" if pods else "it has no pod yet"
    return next(filter(None, [*reasons, refusal]), unknown)


def _reasons(pod: Mapping[str, Any]) -> Iterator[str]:
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            yield _words(condition)
    for container in _containers(pod):
        waiting = container.get("state", {}).get("waiting")
        if waiting and waiting.get("reason") != "ContainerCreating":
            yield _words(waiting)


def _end(condition: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> str:
    # Pods whose processes were killed also end successfully (see `manifests._script`), so take the
    # reason from their containers' last states.
    killed = next((words for pod in pods for words in _killed(pod)), "")
    return "; ".join(filter(None, (str(condition["type"]), _words(condition), killed)))


def _killed(pod: Mapping[str, Any]) -> Iterator[str]:
    name = pod["metadata"]["name"]
    # The pod was evicted, for example.
    if pod["status"].get("phase") == "Failed":
        yield f"pod {name}: {_words(pod['status'])}"
    for container in _containers(pod):
        last = container.get("lastState", {}).get("terminated")
        if last:
            yield f"pod {name}: {_words(last)} (exit code {last['exitCode']})"


def _words(said: Mapping[str, Any]) -> str:
    reason, message = said.get("reason") or "", said.get("message") or ""
    return ": ".join(filter(None, (reason, " ".join(message.split())[:1000])))
