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
from datetime import timedelta
from pathlib import Path

from gemma_neuron.elastic.faults import CollectiveAborted

COLLECTIVE_SECONDS = 30.0
"""Second line of defence: a stopped peer keeps its sockets open, and only a timeout ends waiting for it."""


@contextmanager
def gloo_group(
    store: Path, rank: int, world: int, timeout: float = COLLECTIVE_SECONDS
) -> Iterator[None]:
    """Be rank `rank` of `world` inside the block. `store`: a path no earlier group used (a generation's own).

    Raises CollectiveAborted, with the group already left, when a collective in the block breaks.
    """
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    broken = ""
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(str(store), world),
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
