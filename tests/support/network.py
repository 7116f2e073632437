"""Nodes on one machine: network namespaces, each with an address and a host name of its own."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NUMBERS = itertools.count()
SWITCH = Path(__file__).parent / "switch.py"
CHECKSUMS = Path(__file__).parent / "checksums.py"


@dataclass(frozen=True)
class Network:
    """Namespaces on one switch, to which this process is connected, too.

    Args:
        subnet: first three numbers of all addresses.
    """

    prefix: str
    subnet: str
    nodes: int

    @property
    def head(self) -> str:
        """This process's address for the nodes."""
        return self.address(254)

    def address(self, node: int) -> str:
        """A node's; nodes count from 1."""
        return f"{self.subnet}.{node}"

    def command(self, node: int, words: Sequence[str], *, host: str = "") -> list[str]:
        """The command line that runs a command on a node, with the node's host name."""
        name = self.name(node)
        inside = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host or name, *words]
        return ["ip", "netns", "exec", name, *inside]

    def name(self, node: int) -> str:
        return f"{self.prefix}n{node}"

    def pull(self, node: int) -> None:
        """Pulls a node's cable: what it sends is lost, and nobody tells it so."""
        ip("-n", f"{self.prefix}s", "link", "set", f"port{node}", "down")

    def cut_off(self, node: int) -> None:
        """What a node sends to this process's side is lost, and only that."""
        nobody = ("lladdr", "02:00:00:00:00:01", "nud", "permanent")
        ip("-n", self.name(node), "neigh", "replace", self.head, *nobody, "dev", "eth0")

    def let_back(self, node: int) -> None:
        ip("-n", self.name(node), "neigh", "del", self.head, "dev", "eth0")

    def name_loopback(self, node: int, host: str) -> None:
        """On a node, a host name means 127.0.1.1, as Debian's installer writes it."""
        with Path("/etc/netns", self.name(node), "hosts").open("a") as hosts:
            hosts.write(f"127.0.1.1 {host}\n")


def ip(*words: str) -> None:
    """Runs ``ip``.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr}")


@contextlib.contextmanager
def network(nodes: int, delay_s: float = 0.0) -> Iterator[Network]:
    """A network that is gone afterwards, with the processes that are still on its nodes.

    This thread, and the processes that it starts, are in a namespace of the network meanwhile: they
    reach nothing else. The machine's own interfaces stay as they are, since Chromium gives up what
    it loads when these change.

    Args:
        nodes: how many, at most 250.
        delay_s: how long each frame takes; 0: a bridge of the kernel, as fast as it goes.
    """
    number = 100 * os.getpid() + next(_NUMBERS)
    made = Network(f"p{number % 10**8}", f"10.{64 + number // 250 % 64}.{number % 250}", nodes)
    switch = f"{made.prefix}s"  # a namespace without an address: it answers nobody itself
    with contextlib.ExitStack() as stack:
        ip("netns", "add", switch)
        stack.callback(_remove, switch)
        ports = [_port(stack, made, node, switch) for node in range(1, nodes + 1)]
        ports.append(_plugged(stack, f"{made.prefix}h", made.head, switch, "head"))
        for port in ports:
            ip("-n", switch, "link", "set", port, "up")
        if delay_s:
            for name in (f"{made.prefix}h", *map(made.name, range(1, nodes + 1))):
                _write_checksums(name)
            _start_switch(stack, switch, delay_s, ports)
        else:
            ip("-n", switch, "link", "add", "bridge", "type", "bridge")
            for port in ports:
                ip("-n", switch, "link", "set", port, "master", "bridge")
            ip("-n", switch, "link", "set", "bridge", "up")
        stack.enter_context(_inside(f"{made.prefix}h"))
        yield made


@contextlib.contextmanager
def _inside(name: str) -> Iterator[None]:
    """This thread is in a namespace meanwhile."""
    with Path("/proc/thread-self/ns/net").open() as before, Path("/run/netns", name).open() as new:
        _enter(new.fileno())
        try:
            yield
        finally:
            _enter(before.fileno())


def _enter(namespace: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _plugged(stack: contextlib.ExitStack, name: str, address: str, switch: str, port: str) -> str:
    """Makes a namespace with an address; the switch's interface that leads to it."""
    ip("netns", "add", name)
    stack.callback(_remove, name)
    ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
    ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
    for device in ("lo", "eth0"):
        ip("-n", name, "link", "set", device, "up")
    return port


def _port(stack: contextlib.ExitStack, made: Network, node: int, switch: str) -> str:
    """Makes a node; the switch's interface that leads to it."""
    name = made.name(node)
    port = _plugged(stack, name, made.address(node), switch, f"port{node}")
    ip("-n", name, "route", "add", "default", "via", made.head)
    hosts = Path("/etc/netns", name)
    hosts.mkdir(parents=True)
    stack.callback(shutil.rmtree, hosts)
    names = [(made.address(each), made.name(each)) for each in range(1, made.nodes + 1)]
    lines = [("127.0.0.1", "localhost"), *names, (made.head, "head")]
    (hosts / "hosts").write_text("".join(f"{address} {known}\n" for address, known in lines))
    # No name server: PyTorch asks for the name of each address that it connects to, and a server
    # that no node reaches would cost 10 s each time.
    (hosts / "resolv.conf").write_text("")
    return port


def _remove(name: str) -> None:
    pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=True)
    for pid in map(int, pids.stdout.split()):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    ip("netns", "del", name)


def _write_checksums(name: str) -> None:
    """Lets no device write a namespace's checksums: the switch in user space is none."""
    words = ["ip", "netns", "exec", name, sys.executable, str(CHECKSUMS), "eth0"]
    subprocess.run(words, check=True)


def _start_switch(
    stack: contextlib.ExitStack, switch: str, delay_s: float, ports: list[str]
) -> None:
    """Starts a switch that holds each frame, and waits until it works."""
    process = subprocess.Popen(
        ["ip", "netns", "exec", switch, sys.executable, str(SWITCH), str(delay_s), *ports],
        stdout=subprocess.PIPE,
        text=True,
    )
    stack.callback(process.wait)
    stack.callback(process.kill)
    assert process.stdout is not None
    stack.callback(process.stdout.close)
    assert process.stdout.readline() == "ready\n"
