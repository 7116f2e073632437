"""Start-up of a session's ranks: rank 0 broadcasts its store's address, and all ranks connect.

`Session` calls `start_up` on every rank.
"""

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

from paceline.core.batch_limits.devices import need_trial
from paceline.core.errors import PacelineError
from paceline.wire import RankDevice

# Timeout of waits for other ranks. It is as long as is usual for process groups, because another
# rank may run an evaluation during the wait.
TIMEOUT = timedelta(minutes=30)
# Timeout for connecting to rank 0's store. A short timeout is enough, because the store listens
# before the other ranks get its address.
REACH = timedelta(seconds=30)
_KEY_BYTES = 32
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
# Types of errors that all ranks raise with the same type.
_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TypeError, ValueError, PacelineError)
}


@dataclass(frozen=True)
class Lanes:
    """Lanes of a mesh, for one rank; see `paceline.train.mesh`.

    A group has S ranks that get the same samples; there are W groups.
    """

    # Ranks of the process group, by lane and by group, [S, W].
    ranks: list[list[int]]
    # This rank's index in its group; the rank with index 0 reports for the group.
    place: int
    # Number of this rank's group: 0 … W − 1.
    number: int
    # Process group of this rank's lane, with the backend of the script's process group.
    group: dist.ProcessGroup

    @property
    def lane(self) -> list[int]:
        """Return the ranks of this rank's lane, one of each group, [W]."""
        return self.ranks[self.place]

    @property
    def members(self) -> list[int]:
        """Return the ranks of this rank's group, [S]."""
        return [lane[self.number] for lane in self.ranks]

    def of_lane(self) -> dist.ProcessGroup:
        """Make a further process group of this rank's lane, with gloo. All ranks must call this."""
        return one_of(self.ranks, self.lane, backend="gloo", timeout=TIMEOUT)

    def of_members(self) -> dist.ProcessGroup:
        """Make a gloo process group of the ranks that share this rank's batches; collective."""
        groups = [list(group) for group in zip(*self.ranks, strict=True)]
        return one_of(groups, self.members, backend="gloo", timeout=TIMEOUT)

    def close(self) -> None:
        """Destroy the process group of this rank's lane if its backend is gloo.

        With other backends, this could wait for ranks that have failed.
        """
        # The script may have destroyed all groups.
        with suppress(ValueError):
            if dist.get_backend(self.group) == "gloo":
                dist.destroy_process_group(self.group)


def one_of(groups: list[list[int]], mine: list[int], **options: Any) -> dist.ProcessGroup:
    """Make a process group for each list of ranks; return this rank's group."""
    made = [dist.new_group(ranks, **options) for ranks in groups]
    group = made[groups.index(mine)]
    assert isinstance(group, dist.ProcessGroup)
    return group


@dataclass(frozen=True)
class Startup:
    """State that the ranks share after their start-up."""

    rank: int
    world: int
    store: Store
    # Index of the smallest sample, used as filler; -1 for a stream, where a rank uses any sample
    # that it has.
    filler: int
    # Sizes of the samples, [N], on rank 0; empty for a stream; None on other ranks.
    sizes: npt.NDArray[np.float64] | None
    # Key with which ranks sign pickles in the store, because any process that can connect to the
    # store can write there.
    key: bytes = field(default_factory=lambda: secrets.token_bytes(_KEY_BYTES), repr=False)
    # Set if several ranks share each batch. Then `rank` is the number of this rank's group, `world`
    # is the number of groups, `store` is the store of this rank's lane, and `stores` are the stores
    # of all lanes.
    lanes: Lanes | None = None
    stores: list[Store] = field(default_factory=list)

    @property
    def leads(self) -> bool:
        """Return True if this rank plans for all ranks."""
        return self.rank == 0 and self.speaks

    @property
    def speaks(self) -> bool:
        """Return True if this rank reports for its group."""
        return self.lanes is None or self.lanes.place == 0

    @property
    def process(self) -> int:
        """Return this rank's number in the process group."""
        return self.rank if self.lanes is None else self.lanes.lane[self.rank]

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of the ranks with batches of their own; None: the default."""
        return None if self.lanes is None else self.lanes.group


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks: (0, 1) without a process group.

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


def start_up(arguments: dict[str, Any], sizes: Callable[[], npt.NDArray[np.float64]]) -> Startup:
    """Perform the start-up; each rank calls it.

    If a rank raises an error, also in `sizes`, every rank raises one. On the other ranks, a
    TypeError or a ValueError keeps its type, and any other error becomes a PacelineError.

    Args:
        arguments: the arguments that must be equal on all ranks, by name.
        sizes: returns the size of each sample, [N]; called on rank 0 only.

    Raises:
        ValueError: an argument differs between ranks.
        PacelineError: a rank cannot reach rank 0's store.
    """
    rank, world = rank_and_world()
    if world == 1:
        array = sizes()
        return Startup(rank, world, HashStore(), _filler(array), array)
    if rank > 0:
        return _join(rank, world, arguments)
    try:
        array = sizes()
    except Exception as error:
        _broadcast(_described(error))
        raise
    store = _hosted()
    startup = Startup(rank, world, store, _filler(array), array)
    _broadcast(
        {
            "same": arguments,
            "place": place(),
            "address": os.environ.get("MASTER_ADDR") or socket.getfqdn(),
            "port": store.port,
            "filler": startup.filler,
            "key": startup.key,
        }
    )
    _wait_for_all(world)
    return startup


def shared_sizes(startup: Startup) -> npt.NDArray[np.float64]:
    """Return the size λ of each sample, [N], on every rank; all ranks call it."""
    box = [startup.sizes]
    if startup.world > 1:
        dist.broadcast_object_list(box, src=0)
    assert box[0] is not None, "rank 0 has the sizes"
    return box[0]


def _filler(sizes: npt.NDArray[np.float64]) -> int:
    return int(sizes.argmin()) if len(sizes) else -1


def introduce(
    startup: Startup, own: RankDevice, trial: Callable[[], float | None], *, may_try: bool
) -> list[RankDevice]:
    """Return the ranks' devices, [W]. Each rank calls this once, when it wraps its first model.

    The ranks measure their speed in a trial only if their devices' names do not show how the speeds
    compare. `trial` measures and returns this rank's FLOP/s, or None on failure. Only rank 0's
    `may_try` counts: it is True if a control plane uses the results.
    """
    words = gathered(startup.world, (own, may_try), startup.group)
    devices = [device for device, _ in words]
    # Ranks of a group (`Session(mesh=…)`) make no trial, because a trial would measure a single
    # rank and not the group.
    if words[0][1] and startup.world > 1 and startup.lanes is None and need_trial(devices):
        tried = msgspec.structs.replace(own, flops=trial())
        devices = gathered(startup.world, tried)
    return devices


def gathered(world: int, word: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return every rank's `word`, a small object, in the order of the ranks. All ranks call it."""
    words = [word] * world
    if world > 1:
        dist.all_gather_object(words, word, group=group)
    return words


def _hosted() -> TCPStore:
    """Host the store on rank 0. Listen only on loopback if MASTER_ADDR is a loopback address."""
    make = partial(TCPStore, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    if os.environ.get("MASTER_ADDR") not in ("127.0.0.1", "localhost"):
        return make("localhost", 0, None)
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    return make("127.0.0.1", port, None, master_listen_fd=listening.detach())


def _join(rank: int, world: int, arguments: dict[str, Any]) -> Startup:
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
    return Startup(rank, world, store, word["filler"], None, word["key"])


def _wait_for_all(world: int, error: Exception | None = None) -> None:
    """Wait until each rank is connected to rank 0's store, or has failed to connect.

    Raise the error of another rank, if any. Without this wait, rank 0 and its store could end
    before another rank is connected.
    """
    words = gathered(world, {} if error is None else _described(error))
    for rank, word in enumerate(words):
        if error is None and word:
            _raise(rank, word)


def _described(error: Exception) -> dict[str, Any]:
    return {"kind": type(error).__name__, "error": str(error)}


def _raise(rank: int, word: dict[str, Any]) -> NoReturn:
    kind = _KINDS.get(word["kind"])
    if kind is None:
        raise PacelineError(f"on rank {rank}: {word['kind']}: {word['error']}")
    raise kind(word["error"])


def place() -> str:
    """Return an ID of this machine and network: processes with equal IDs share a loopback device.

    Host names are only a fallback, because they are not unique: cloned machines share a name, and
    a container may use its host's name.
    """
    try:
        network = str(_NETWORK.readlink())
    except OSError:
        network = ""
    return f"{kernel()} {network}"


def kernel() -> str:
    """Return an ID of the running kernel, or the host name where there is no such ID."""
    try:
        return _BOOT_ID.read_text().strip()
    # The file is missing outside of Linux, and in containers that hide it.
    except OSError:
        return socket.gethostname()


def reach(rank: int, host: str, port: int) -> TCPStore:
    """Connect this rank to rank 0's store; raise a PacelineError if that fails."""
    try:
        store = TCPStore(host, port, None, is_master=False, timeout=REACH)
    except dist.DistError as error:
        raise PacelineError(
            f"rank {rank} cannot reach rank 0's store at {host}:{port}: set MASTER_ADDR on rank 0 "
            "to an address of its node that all nodes reach, and allow connections between the "
            "nodes on all ports"
        ) from error
    store.set_timeout(TIMEOUT)
    return store


def _broadcast(word: dict[str, Any] | None) -> dict[str, Any]:
    box = [word]
    dist.broadcast_object_list(box, src=0)
    assert box[0] is not None
    return box[0]
