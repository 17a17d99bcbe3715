"""The memory a rank file's pieces lie in: what unbuffered writing and a disk's requests need."""

import numpy as np
import pytest

from gemma_neuron.sharding.source_files import HUGE_PAGE_BYTES, anonymous_memory


@pytest.mark.parametrize("count", [4096, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES])
def test_huge_memory_begins_at_a_huge_page_and_has_the_asked_length(count: int) -> None:
    memory = anonymous_memory(count, huge=True)
    assert len(memory) == count
    assert np.frombuffer(memory, np.uint8).ctypes.data % HUGE_PAGE_BYTES == 0
    memory[:] = b"x" * count
    assert bytes(memory) == b"x" * count
