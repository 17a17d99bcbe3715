"""Every released size at its true shapes: names and shapes as stock saves them, bytes a hole in a sparse file.

What is not a hole are the layer_scalars, which are always read. Nothing else may be: the files are up to 62 GB long.
"""

from __future__ import annotations

import json
import math
import struct
import time
from pathlib import Path

import pytest

from tests.checkpoint.helpers import inspect
from tests.real_configs import GEMMA3, GEMMA4, NAMES, real_config, stock_tensors
from tests.tiny import write_json
from tests.tiny_tokenizer import write_tokenizer

HALF = b"\x00\x3f"  # 0.5 in bfloat16
BORROWING = range(15, 35)
"""E2B's layers without K/V of their own."""


def write_sparse(folder: Path, name: str, tensors: dict[str, tuple[int, ...]]) -> None:
    """The size's config, a tokenizer, and a weights file that takes kilobytes of disk."""
    header: dict[str, object] = {}
    end, scalars = 0, []
    for tensor, shape in tensors.items():
        start, end = end, end + 2 * math.prod(shape)
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
        scalars += [start] if tensor.endswith("layer_scalar") else []
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for start in scalars:
            file.seek(8 + len(text) + start)
            file.write(HALF)
        try:
            file.truncate(8 + len(text) + end)
        except OSError as error:
            pytest.skip(f"this file system has no sparse file of {end} bytes: {error}")
    write_json(folder / "config.json", real_config(name))
    write_tokenizer(folder, "gemma4" if name in GEMMA4 else "gemma3", 4096)


@pytest.mark.fault("load-04-modality-prefix")
@pytest.mark.parametrize("name", NAMES)
def test_structure_is_checked_from_headers_alone(tmp_path: Path, name: str) -> None:
    tensors = stock_tensors(name)
    write_sparse(tmp_path, name, tensors)
    started = time.process_time()
    report = inspect(tmp_path, need_template=False)
    assert time.process_time() - started < 5
    assert [(f.kind, f.message) for f in report.errors] == []
    counts = report.tensors
    assert (counts.used + counts.skipped, counts.unexplained) == (len(tensors), 0)
    small = name in ("gemma-3-270m", "gemma-3-1b")
    rules = set() if small else {"vision"} if name in GEMMA3 else {"vision", "audio"}
    assert report.skipped_by_rule.keys() == rules
    skipped = [row.tensor for row in report.ledger if row.status == "skipped"]
    assert len(skipped) == sum(report.skipped_by_rule.values())
    assert not any(".language_model.layers." in tensor for tensor in skipped)
    assert [(b.min, b.max) for b in report.buffers] == [(0.5, 0.5)] * len(report.buffers)
    layers = real_config(name).get("text_config", real_config(name))["num_hidden_layers"]
    assert len(report.buffers) == (layers if name in GEMMA4 else 0)


@pytest.mark.fault("load-06-kv-shared-extra")
def test_e2b_with_kv_on_every_layer(tmp_path: Path) -> None:
    tensors = stock_tensors("gemma-4-E2B")
    base = "model.language_model.layers.{}.self_attn.{}.weight"
    for layer in BORROWING:
        like = 14 if layer % 5 == 4 else 13  # every fifth is global, with wider heads
        for part in ("k_proj", "v_proj", "k_norm"):
            assert base.format(layer, part) not in tensors
            tensors[base.format(layer, part)] = tensors[base.format(like, part)]
    write_sparse(tmp_path, "gemma-4-E2B", tensors)
    report = inspect(tmp_path, need_template=False)
    assert [(f.kind, f.message) for f in report.errors] == []
    assert report.skipped_by_rule["borrowed-kv"] == 3 * len(BORROWING)
