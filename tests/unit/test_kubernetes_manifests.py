"""docker/kubernetes: what the control plane needs to run, and no more rights than it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from paceline_backend.cli import register

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docker" / "kubernetes"
APP = typer.Typer()
register(APP)
COMMANDS: Any = typer.main.get_command(APP)
KUSTOMIZATION = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())


def objects(*names: str) -> list[dict[str, Any]]:
    """What stands in some files; without names, in all that are applied."""
    names = names or tuple(KUSTOMIZATION["resources"])
    return [each for name in names for each in yaml.safe_load_all((FOLDER / name).read_text())]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [each for each in objects() if each["kind"] == kind]


def test_every_file_is_applied_or_said_to_be_optional() -> None:
    files = {path.name for path in FOLDER.glob("*.yaml")}
    optional = {"kustomization.yaml", "cordon.yaml", "secret.example.yaml", "secret.yaml"}
    assert set(KUSTOMIZATION["resources"]) == files - optional
    assert "docker/kubernetes/secret.yaml" in (ROOT / ".gitignore").read_text()


def test_all_is_in_our_namespaces() -> None:
    names = {each["metadata"]["name"] for each in of_kind("Namespace")}
    for each in objects():
        if each["kind"] != "Namespace":
            assert each["metadata"]["namespace"] in names, each["metadata"]


@pytest.mark.parametrize("part", ["web", "worker"])
def test_commands_exist(part: str) -> None:
    [deployment] = [
        each for each in of_kind("Deployment") if each["metadata"]["name"] == f"paceline-{part}"
    ]
    pod = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    command, *options = container["args"]
    context = COMMANDS.commands[command].make_context(command, options)
    assert context.params["only"] == part
    assert str(context.params["data"]) == "/data"
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert mounted == {"/data", "/tmp"}
    dockerfile = (ROOT / "docker" / "control-plane.Dockerfile").read_text()
    assert f"USER {pod['securityContext']['runAsUser']}" in dockerfile
    assert deployment["spec"]["selector"]["matchLabels"].items() <= (
        deployment["spec"]["template"]["metadata"]["labels"].items()
    )


def test_variables_are_known() -> None:
    """Each is an option of `paceline server`, or the engine's."""
    known = {each.envvar for each in COMMANDS.commands["server"].params}
    engine = (ROOT / "docs" / "backends" / "kubernetes.md").read_text()
    [settings] = of_kind("ConfigMap")
    [secret] = objects("secret.example.yaml")
    for name in [*settings["data"], *secret["stringData"]]:
        assert name in known or f"`{name}`" in engine, name
    assert not any(secret["stringData"].values())


def test_probes_ask_what_the_server_answers() -> None:
    [web] = [each for each in of_kind("Deployment") if "web" in each["metadata"]["name"]]
    [container] = web["spec"]["template"]["spec"]["containers"]
    paths = {
        kind: container[kind]["httpGet"]["path"]
        for kind in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert paths == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    [service] = of_kind("Service")
    labels = web["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_runs_cannot_use_what_is_the_control_planes() -> None:
    [settings] = of_kind("ConfigMap")
    [account] = of_kind("ServiceAccount")
    [role] = of_kind("Role")
    namespaces = settings["data"]["PACELINE_KUBERNETES_NAMESPACES"].split(",")
    assert role["metadata"]["namespace"] in namespaces
    assert account["metadata"]["namespace"] not in namespaces
    verbs = {rule["resources"][0]: set(rule["verbs"]) for rule in role["rules"]}
    assert verbs["secrets"] == {"create", "patch", "delete"}  # it reads none
