"""A gloo process group that survivors leave at once when a peer is gone.

A rank that sees the dead peer's closed socket and merely stops leaves the others waiting for it until the group's
timeout: 16 of 16 kills among 4 ranks hung a survivor. A rank that destroys its own group closes its sockets,
and the next one sees that: 0 of 140 hung.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from gemma_neuron.elastic.faults import CollectiveAborted

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

COLLECTIVE_SECONDS = 30.0
"""Second line of defence: a stopped peer keeps its sockets open, and only a timeout ends waiting for it."""

MEETING_SECONDS = 60.0
"""For ranks that were told at the same time where to meet."""
INTERFACE = "GLOO_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where ranks on several machines meet: the `hosted_store` of one of them, at its machine's address."""

    host: str
    port: int


def hosted_store(host: str) -> TCPStore:
    """A store that ranks of other machines meet at, for as long as it is kept: at `host`, on a port of its own."""
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=_meeting_time())


def use_address(address: str) -> None:
    """Let groups of this process talk by the interface that has `address`, unless the machine's owner said by which.

    gloo would take what the machine's own name stands for, which is often a loopback address.
    """
    import psutil

    if INTERFACE in os.environ:
        return
    for interface, addresses in psutil.net_if_addrs().items():
        if any(_plain(found.address) == address for found in addresses):
            os.environ[INTERFACE] = interface


@contextmanager
def gloo_group(
    store: Path | Meeting, rank: int, world: int, timeout: float = COLLECTIVE_SECONDS
) -> Iterator[None]:
    """Be rank `rank` of `world` inside the block. `store`: a path no earlier group used (a generation's own), on one
    machine; on several, a store no earlier group met at.

    Raises CollectiveAborted, with the group already left, when a collective in the block breaks.
    """
    import torch.distributed as dist

    broken = ""
    try:
        dist.init_process_group(
            "gloo",
            store=_store(store, world),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout),
        )
        yield
    except RuntimeError as error:
        broken = str(error).splitlines()[0]
        # The traceback's frames hold the group, and with it the sockets the others wait on.
        traceback.clear_frames(error.__traceback__)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if broken:
        raise CollectiveAborted(
            f"Rank {rank} left a broken collective: {broken}", rank=rank, pid=os.getpid()
        )


def _store(store: Path | Meeting, world: int) -> Store:
    from torch._C._distributed_c10d import FileStore, TCPStore

    if isinstance(store, Path):
        return FileStore(str(store), world)
    return TCPStore(store.host, store.port, wait_for_workers=False, timeout=_meeting_time())


def _meeting_time() -> timedelta:
    return timedelta(seconds=MEETING_SECONDS)


def _plain(address: str) -> str:
    """Without the zone that a link-local IPv6 address is given with."""
    return address.partition("%")[0]
