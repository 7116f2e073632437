"""Credential plugins of a kubeconfig: commands that print a Kubernetes ``ExecCredential``."""

from __future__ import annotations

import json
import os
import subprocess
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import msgspec

from paceline.node.processes import die_with_parent

_TIMEOUT_S = 20.0
# A credential is renewed this many seconds before it expires.
_EARLY_S = 60.0


class Variable(msgspec.Struct, frozen=True):
    """Environment variable of a plugin's command."""

    name: str
    value: str


class Plugin(msgspec.Struct, frozen=True, rename="camel"):
    """Entry `users[].user.exec` of a kubeconfig."""

    command: str
    api_version: str
    args: list[str] | None = None
    env: list[Variable] | None = None


class Credential(msgspec.Struct, frozen=True):
    """Credential that a plugin's command has printed."""

    token: str = ""
    certificate: str = msgspec.field(default="", name="clientCertificateData")
    key: str = msgspec.field(default="", name="clientKeyData")
    ends: datetime | None = msgspec.field(default=None, name="expirationTimestamp")


class _Answer(msgspec.Struct, frozen=True):
    status: Credential


# Cache of credentials, by plugin (as JSON) and folder of the kubeconfig.
asked: dict[tuple[bytes, Path], Credential] = {}


def ask(plugin: Plugin, folder: Path) -> Credential:
    """Return the credential of a plugin, from the cache if it has not expired.

    Args:
        folder: folder of the kubeconfig, to which paths are relative.

    Raises:
        OSError, ValueError: the command failed.
    """
    key = (msgspec.json.encode(plugin), folder)
    credential = asked.get(key)
    if credential is None or (
        credential.ends is not None and credential.ends.timestamp() - _EARLY_S < time.time()
    ):
        credential = asked[key] = _run(plugin, folder)
    return credential


def _run(plugin: Plugin, folder: Path) -> Credential:
    command = str(folder / plugin.command) if "/" in plugin.command else plugin.command
    question: dict[str, Any] = {
        "apiVersion": plugin.api_version,
        "kind": "ExecCredential",
        "spec": {"interactive": False},
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
    env |= {variable.name: variable.value for variable in plugin.env or ()}
    try:
        done = subprocess.run(
            [command, *(plugin.args or ())],
            env={**env, "KUBERNETES_EXEC_INFO": json.dumps(question)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=False,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{command} did not answer within {_TIMEOUT_S:g} s") from None
    if done.returncode:
        said = " ".join(done.stderr.decode(errors="replace").split())[:500]
        raise ValueError(f"{command} exited with {done.returncode}: {said}")
    try:
        return msgspec.json.decode(done.stdout, type=_Answer).status
    except msgspec.ValidationError as error:
        raise ValueError(f"{command}: {error}") from error
