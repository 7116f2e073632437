"""Where the API server is: kubeconfigs, and the service account of a pod."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from paceline_backend.backends import EngineAwayError
from paceline_backend.backends.kubernetes import access


def config(folder: Path, user: dict[str, Any] | None = None, **cluster: Any) -> Path:
    """Writes a kubeconfig with two contexts."""
    clusters = {"one": cluster | {"server": "https://a:6443"}, "two": {"server": "https://b:6443"}}
    contexts = {
        "here": {"cluster": "one", "user": "ada", "namespace": "training"},
        "there": {"cluster": "two", "user": "ada"},
        "nowhere": {"cluster": "three", "user": "ada"},
    }
    content = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": each} for name, each in clusters.items()],
        "contexts": [{"name": name, "context": each} for name, each in contexts.items()],
        "users": [{"name": "ada", "user": user or {"token": "t"}}],
        "current-context": "here",
    }
    path = folder / "config"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that knows no cluster."""
    for name in ("KUBECONFIG", access.CONTEXT):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path / "nothing")


def test_a_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(tmp_path, **{"tls-server-name": "api", "proxy-url": "http://proxy:3128"})
    monkeypatch.setenv("KUBECONFIG", str(path))
    here = access.find()
    assert (here.server, here.namespace, here.token) == ("https://a:6443", "training", "t")
    assert (here.proxy, here.extensions) == ("http://proxy:3128", {"sni_hostname": "api"})
    assert here.ssl.verify_mode is ssl.CERT_REQUIRED
    assert "'t'" not in repr(here)
    monkeypatch.setenv(access.CONTEXT, "there")
    assert (access.find().server, access.find().namespace) == ("https://b:6443", "default")


def test_a_home(tmp_path: Path) -> None:
    (tmp_path / ".kube").mkdir()
    config(tmp_path / ".kube", {"tokenFile": "token"})
    (tmp_path / ".kube" / "token").write_text("of the file\n")
    assert access.find().token == "of the file"


def test_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    authority = trustme.CA()
    own = authority.issue_cert("ada")
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    own.cert_chain_pems[0].write_to_path(tmp_path / "ada.pem")
    own.private_key_pem.write_to_path(tmp_path / "ada.key")
    user = {"client-certificate": "ada.pem", "client-key": str(tmp_path / "ada.key")}
    monkeypatch.setenv(
        "KUBECONFIG", str(config(tmp_path, user, **{"certificate-authority": "ca.pem"}))
    )
    [known] = access.find().ssl.get_ca_certs()
    assert "trustme" in str(known)


def test_no_check_of_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = config(tmp_path, **{"insecure-skip-tls-verify": True})
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert access.find().ssl.verify_mode is ssl.CERT_NONE


def test_a_pod(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trustme.CA().cert_pem.write_to_path(tmp_path / "ca.crt")
    (tmp_path / "token").write_text("of the pod\n")
    (tmp_path / "namespace").write_text("paceline")
    monkeypatch.setattr(access, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    own = access.find()
    assert (own.server, own.namespace, own.token) == (
        "https://[fd00::1]:443",
        "paceline",
        "of the pod",
    )


@pytest.mark.parametrize(
    "user, context, words",
    [
        ({"auth-provider": {"name": "gcp"}}, "here", "use exec"),
        ({"token": "t"}, "nowhere", "no cluster 'three'"),
        ({"token": "t"}, "elsewhere", "no context 'elsewhere'"),
        ({"token": 3}, "here", "Expected `str`"),
        ({"client-certificate": "missing.pem"}, "here", "missing.pem"),
    ],
)
def test_what_cannot_be_used(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: dict[str, Any],
    context: str,
    words: str,
) -> None:
    path = config(tmp_path, user)
    monkeypatch.setenv("KUBECONFIG", str(path))
    monkeypatch.setenv(access.CONTEXT, context)
    with pytest.raises(EngineAwayError, match=words) as refused:
        access.find()
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("text", ["{", "clusters: 3", ""])
def test_what_is_no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "config").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "config"))
    with pytest.raises(EngineAwayError):
        access.find()


def test_a_machine_that_knows_no_cluster() -> None:
    with pytest.raises(EngineAwayError, match="set KUBECONFIG"):
        access.find()
