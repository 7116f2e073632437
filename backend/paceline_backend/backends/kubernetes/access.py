"""Address and credentials of the API server, found as `kubectl` does on this machine."""

from __future__ import annotations

import os
import ssl
from base64 import b64decode
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import msgspec
import yaml

from paceline_backend.backends.engine import EngineAwayError
from paceline_backend.backends.kubernetes import plugins
from paceline_backend.backends.kubernetes.plugins import Plugin

CONTEXT = "PACELINE_KUBERNETES_CONTEXT"
SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_KEBAB: Any = {"rename": "kebab", "frozen": True}

Entry = TypeVar("Entry", bound="_Named")


@dataclass(frozen=True)
class Access:
    """Parameters of a connection.

    `server` is a URL, and `extensions` are httpx's request extensions for each request.
    """

    server: str
    ssl: ssl.SSLContext
    namespace: str
    token: str = field(default="", repr=False)
    proxy: str | None = None
    extensions: Mapping[str, Any] = field(default_factory=dict)


class _Cluster(msgspec.Struct, **_KEBAB):
    server: str
    certificate_authority: str = ""
    certificate_authority_data: str = ""
    insecure_skip_tls_verify: bool = False
    tls_server_name: str = ""
    proxy_url: str | None = None


class _User(msgspec.Struct, **_KEBAB):
    token: str = ""
    token_file: str = msgspec.field(default="", name="tokenFile")
    client_certificate: str = ""
    client_certificate_data: str = ""
    client_key: str = ""
    client_key_data: str = ""
    exec: Plugin | None = None
    auth_provider: dict[str, Any] | None = None


class _Context(msgspec.Struct, **_KEBAB):
    cluster: str
    user: str
    namespace: str = "default"


class _Named(msgspec.Struct, frozen=True):
    name: str


class _NamedCluster(_Named, frozen=True):
    cluster: _Cluster


class _NamedUser(_Named, frozen=True):
    user: _User


class _NamedContext(_Named, frozen=True):
    context: _Context


class _Config(msgspec.Struct, **_KEBAB):
    clusters: list[_NamedCluster]
    users: list[_NamedUser]
    contexts: list[_NamedContext]
    current_context: str = ""


def find() -> Access:
    """Read the file of KUBECONFIG, else the service account of this pod, else ~/.kube/config.

    Raises:
        EngineAwayError: none of the three exists, or the first that exists cannot be used.
    """
    named = os.environ.get("KUBECONFIG")
    home = Path.home() / ".kube" / "config"
    try:
        if named:
            return _read(Path(named))
        if (SERVICE_ACCOUNT / "token").exists():
            return _own_pod()
        if home.exists():
            return _read(home)
    except (OSError, ValueError, LookupError, yaml.YAMLError) as error:
        raise EngineAwayError(f"{named or home}: {error}") from error
    raise EngineAwayError(
        "no cluster is configured: set KUBECONFIG, or run the server in a pod with a service "
        "account"
    )


def forget() -> None:
    """Clear the cached answers of credential plugins."""
    plugins.asked.clear()


def _own_pod() -> Access:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    host = f"[{host}]" if ":" in host else host
    return Access(
        f"https://{host}:{port}",
        _lenient(ssl.create_default_context(cafile=SERVICE_ACCOUNT / "ca.crt")),
        (SERVICE_ACCOUNT / "namespace").read_text().strip(),
        # Kubernetes renews the token about every hour, so it is read for each connection.
        (SERVICE_ACCOUNT / "token").read_text().strip(),
    )


def _read(path: Path) -> Access:
    config = msgspec.convert(yaml.safe_load(path.read_text()), _Config)
    context = _named(config.contexts, os.environ.get(CONTEXT) or config.current_context, "context")
    chosen = context.context
    cluster = _named(config.clusters, chosen.cluster, "cluster").cluster
    user = _named(config.users, chosen.user, "user").user
    if user.auth_provider is not None:
        raise ValueError("auth-provider: kubectl no longer supports it; use exec")
    token = user.token
    if user.token_file:
        token = (path.parent / user.token_file).read_text().strip()
    if user.exec is not None:
        credential = plugins.ask(user.exec, path.parent)
        token = credential.token
        chain = (credential.certificate, credential.key)
    else:
        chain = _chain(user, path.parent)
    return Access(
        cluster.server,
        _ssl(cluster, path.parent, *chain),
        chosen.namespace,
        token,
        cluster.proxy_url,
        {"sni_hostname": cluster.tls_server_name} if cluster.tls_server_name else {},
    )


def _named(entries: list[Entry], name: str, kind: str) -> Entry:
    for entry in entries:
        if entry.name == name:
            return entry
    raise LookupError(f"there is no {kind} {name!r}")


def _chain(user: _User, folder: Path) -> tuple[str, str]:
    return (
        _pem(user.client_certificate_data, user.client_certificate, folder),
        _pem(user.client_key_data, user.client_key, folder),
    )


def _pem(data: str, path: str, folder: Path) -> str:
    if data:
        return b64decode(data).decode()
    return (folder / path).read_text() if path else ""


def _lenient(context: ssl.SSLContext) -> ssl.SSLContext:
    # Python 3.13 is strict by default and refuses the certificate authorities of many clusters.
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def _ssl(cluster: _Cluster, folder: Path, certificate: str, key: str) -> ssl.SSLContext:
    authority = _pem(cluster.certificate_authority_data, cluster.certificate_authority, folder)
    context = _lenient(ssl.create_default_context(cadata=authority or None))
    if cluster.insecure_skip_tls_verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if certificate:
        # Python's ssl reads a client's certificate from files only.
        with TemporaryDirectory() as private:
            chain, own = Path(private, "chain"), Path(private, "key")
            chain.write_text(certificate)
            own.touch(0o600)
            own.write_text(key)
            context.load_cert_chain(chain, own)
    return context
