"""How the ranks of a session meet: rank 0 broadcasts its store's address, and all connect to it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import msgspec
import numpy as np
import numpy.typing as npt
import torch.distributed as dist
from torch.distributed import HashStore, Store, TCPStore  # type: ignore[attr-defined]

from paceline.core.amounts.devices import need_trial
from paceline.core.errors import PacelineError
from paceline.wire import RankDevice

TIMEOUT = timedelta(minutes=30)  # a process group's: a rank may evaluate meanwhile
REACH = timedelta(seconds=30)  # rank 0's store listens before the others learn its address
_KEY_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
# Errors of the user's arguments. Every rank raises them as they are.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, PacelineError)
}


@dataclass(frozen=True)
class Lanes:
    """The lanes of a mesh, for one rank; see `paceline.train.mesh`."""

    ranks: list[list[int]]  # of the process group, [S, W]: by place in a group, and by group
    place: int  # of this rank in its group; 0: it speaks for the group
    number: int  # of this rank's group: 0 … W − 1
    group: dist.ProcessGroup  # of this rank's lane, as the script's own

    @property
    def lane(self) -> list[int]:
        """The ranks with this rank's place, one of each group, [W]."""
        return self.ranks[self.place]

    @property
    def members(self) -> list[int]:
        """The ranks of this rank's group, [S]."""
        return [lane[self.number] for lane in self.ranks]

    def of_lane(self) -> dist.ProcessGroup:
        """Another process group of this rank's lane, over gloo; all ranks call it at once."""
        return one_of(self.ranks, self.lane, backend="gloo", timeout=TIMEOUT)

    def of_members(self) -> dist.ProcessGroup:
        """A process group of this rank's group, over gloo; all ranks call it at once."""
        groups = [list(group) for group in zip(*self.ranks, strict=True)]
        return one_of(groups, self.members, backend="gloo", timeout=TIMEOUT)

    def close(self) -> None:
        """Ends the lane's process group, unless that would wait for ranks that may have failed."""
        with suppress(ValueError):  # the script has ended all groups
            if dist.get_backend(self.group) == "gloo":
                dist.destroy_process_group(self.group)


def one_of(groups: list[list[int]], mine: list[int], **options: Any) -> dist.ProcessGroup:
    """Makes a process group for each of these; returns this rank's."""
    made = [dist.new_group(ranks, **options) for ranks in groups]
    group = made[groups.index(mine)]
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True)
class Meeting:
    """What each rank knows once the ranks have met. The sizes stay on rank 0."""

    rank: int
    world: int
    store: Store
    filler: int  # the smallest sample; -1: of a stream, whichever the rank has
    sizes: npt.NDArray[np.float64] | None  # [N], on rank 0; of a stream empty
    # Ranks sign pickles in the store with it: whoever reaches the store can write there.
    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)
    # Where several ranks share each batch: then `rank` is the number of this rank's group and
    # `world` the number of groups, the store is the lane's, and `stores` are those of all lanes.
    lanes: Lanes | None = None
    stores: list[Store] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        """Whether this rank plans for all."""
        return self.rank == 0 and self.speaks

    @property
    def speaks(self) -> bool:
        """Whether this rank reports what its group does."""
        return self.lanes is None or self.lanes.place == 0

    @property
    def process(self) -> int:
        """This rank's number in the process group."""
        return self.rank if self.lanes is None else self.lanes.lane[self.rank]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """The process group of the ranks that have batches of their own; None: the default one."""
        return None if self.lanes is None else self.lanes.group


def rank_and_world() -> tuple[int, int]:
    """This process's rank and the number of ranks: (0, 1) without a process group.

    Raises:
        PacelineError: a launcher started several ranks, but there is no process group yet.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise PacelineError(
            "there are several ranks but no process group: call "
            "torch.distributed.init_process_group() before paceline.Session()"
        )
    return 0, 1


def meet(arguments: dict[str, Any], sizes: Callable[[], npt.NDArray[np.float64]]) -> Meeting:
    """Brings the ranks together; each calls it.

    Args:
        arguments: those that must be equal on all ranks, by name.
        sizes: called on rank 0.

    Raises:
        ValueError: an argument differs between ranks.
        PacelineError: a rank cannot reach rank 0's store.
        whatever `sizes` raises.

    If a rank raises, every rank does. What is neither a TypeError nor a ValueError
    is a PacelineError on the other ranks.
    """
    rank, world = rank_and_world()
    if world == 1:
        array = sizes()
        return Meeting(rank, world, HashStore(), _filler(array), array)
    if rank > 0:
        return _join(rank, world, arguments)
    try:
        array = sizes()
    except Exception as error:
        _broadcast(_described(error))
        raise
    store = _hosted()
    meeting = Meeting(rank, world, store, _filler(array), array)
    _broadcast(
        {
            "same": arguments,
            "place": place(),
            "address": os.environ.get("MASTER_ADDR") or socket.getfqdn(),
            "port": store.port,
            "filler": meeting.filler,
            "key": meeting.key,
        }
    )
    _wait_for_all(world)
    return meeting


def shared_sizes(meeting: Meeting) -> npt.NDArray[np.float64]:
    """λ of every sample, [N], on every rank; each calls it."""
    box = [meeting.sizes]
    if meeting.world > 1:
        dist.broadcast_object_list(box, src=0)
    assert box[0] is not None, "rank 0 has the sizes"
    return box[0]


def _filler(sizes: npt.NDArray[np.float64]) -> int:
    return int(sizes.argmin()) if len(sizes) else -1


def introduce(
    meeting: Meeting, own: RankDevice, trial: Callable[[], float | None], *, may_try: bool
) -> list[RankDevice]:
    """Which devices the ranks have. Each rank calls it once, when it wraps a model.

    Nobody waits for a trial unless only a trial tells how the devices compare.

    Args:
        meeting: of the ranks.
        own: this rank's device.
        trial: measures operations a second on this rank; None: it cannot.
        may_try: on rank 0, whether somebody wants to know what a trial says.

    Returns:
        Each rank's device, [W].
    """
    words = gathered(meeting.world, (own, may_try), meeting.group)
    devices = [device for device, _ in words]
    # Ranks that share a batch make no trial: it would be of a rank, and not of its group.
    if words[0][1] and meeting.world > 1 and meeting.lanes is None and need_trial(devices):
        tried = msgspec.structs.replace(own, flops=trial())
        devices = gathered(meeting.world, tried)
    return devices


def gathered(world: int, word: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """What each rank says, by rank; each calls it.

    Args:
        world: how many ranks there are.
        word: of this rank.
        group: of these ranks; None: the default one.
    """
    words = [word] * world
    if world > 1:
        dist.all_gather_object(words, word, group=group)
    return words


def _hosted() -> TCPStore:
    """Rank 0's store: reachable from this machine only, where all ranks are on it."""
    make = partial(TCPStore, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    if os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost"):
        return make("localhost", 0, None)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return make("127.0.0.1", port, None, master_listen_fd=listening.detach())


def _join(rank: int, world: int, arguments: dict[str, Any]) -> Meeting:
    word = _broadcast(None)
    if "error" in word:
        _raise(0, word)
    try:
        for name, value in arguments.items():
            if value != word["same"][name]:
                raise ValueError(
                    f"{name} is {value!r} on rank {rank} but {word['same'][name]!r} on rank 0: "
                    "give every rank the same value"
                )
        host = "127.0.0.1" if word["place"] == place() else word["address"]
        store = reach(rank, host, word["port"])
    except Exception as error:
        _wait_for_all(world, error)
        raise
    _wait_for_all(world)
    return Meeting(rank, world, store, word["filler"], None, word["key"])


def _wait_for_all(world: int, error: Exception | None = None) -> None:
    """Waits until each rank is connected to rank 0's store, or has failed to do so.

    Without that, rank 0 could end, and its store with it, before another rank is connected.
    """
    words = gathered(world, {} if error is None else _described(error))
    for rank, word in enumerate(words):
        if error is None and word:
            _raise(rank, word)


def _described(error: Exception) -> dict[str, Any]:
    return {"kind": type(error).__name__, "error": str(error)}


def _raise(rank: int, word: dict[str, Any]) -> NoReturn:
    """Raises another rank's error on this rank."""
    kind = _KINDS.get(word["kind"])
    if kind is None:
        raise PacelineError(f"on rank {rank}: {word['kind']}: {word['error']}")
    raise kind(word["error"])


def place() -> str:
    """Names where this process runs: two processes in one place reach each other over loopback.

    Such processes share a kernel, known by its boot id, and a network namespace. The host name
    does not tell: cloned machines share a name, and a container may take its host's.
    """
    try:
        network = str(_NETWORK.readlink())
    except OSError:
        network = ""
    return f"{kernel()} {network}"


def kernel() -> str:
    """Names the kernel that this process runs on."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:  # not Linux, or a container that hides it
        return socket.gethostname()


def reach(rank: int, host: str, port: int) -> TCPStore:
    """This rank's connection to rank 0's store.

    Raises:
        PacelineError: nothing answers there.
    """
    try:
        store = TCPStore(host, port, None, is_master=False, timeout=REACH)
    except dist.DistError as error:
        raise PacelineError(
            f"rank {rank} cannot reach rank 0's store at {host}:{port}: set MASTER_ADDR on rank 0 "
            "to an address of its node that all nodes reach, and let connections between the nodes "
            "through on all ports"
        ) from error
    store.set_timeout(TIMEOUT)
    return store


def _broadcast(word: dict[str, Any] | None) -> dict[str, Any]:
    box = [word]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]
