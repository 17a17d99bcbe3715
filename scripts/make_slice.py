"""A slice of a real Gemma 4 size: true widths, few layers, random weights, in the hub's folder layout.

The bits of a matrix are random in sign and mantissa, with exponents around 1/sqrt(fan-in): what a disk, a hash or a
compressor sees is as incompressible as trained weights, and a forward pass stays finite. `layer_scalar` is never 1.
The same seed writes the same bytes.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[1]))

from gemma_neuron.artifacts import write_json_atomic
from gemma_neuron.models.registry import read_geometry, read_parameter_table
from gemma_neuron.parameters import ParameterSpec
from tests.sizes import GENERATION, SIZES, size_config
from tests.tiny import GEMMA4_TEMPLATE, encode, safetensors_header, values_of
from tests.tiny_tokenizer import write_tokenizer

PREFIX = "model.language_model."
LAYERS = {"E2B": 10, "E4B": 12, "12B": 6, "26B-A4B": 2, "31B": 6}
"""Layers by default: both kinds of each size, and the ones that borrow K/V where there are any."""
BLOCK = 1 << 23
"""Values drawn at once by one thread; each block has a generator of its own."""
ITEM_BYTES = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="folder to write; must not be there")
    parser.add_argument("--family", choices=SIZES, default="31B")
    parser.add_argument("--layers", type=int, help="default: 6 of the 31B, see LAYERS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--file-gb", type=float, default=2.0, help="a file's most, but one tensor")
    asked = parser.parse_args()
    if asked.out.exists():
        parser.error(f"{asked.out} is there already")
    started = time.perf_counter()
    limit = int(asked.file_gb * 1e9)
    written = write_slice(asked.out, asked.family, asked.layers, asked.seed, limit)
    seconds = time.perf_counter() - started
    print(
        f"{asked.out}: {written / 1e9:.2f} GB in {seconds:.1f} s, {written / seconds / 1e9:.2f} GB/s"
    )
    return 0


def write_slice(
    out: Path, family: str, layers: int | None = None, seed: int = 0, limit: int = 2 * 10**9
) -> int:
    """Write the folder beside and rename it; bytes of tensors written."""
    config = size_config(family, LAYERS[family] if layers is None else layers)
    specs = sorted(
        (s for s in read_parameter_table(read_geometry(config)) if s.origin == "checkpoint"),
        key=lambda spec: spec.name,  # the order of safetensors' own writer
    )
    beside = out.with_name(out.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    _write_small_files(beside, config, family)
    files = _split(specs, limit)
    weight_map, total = {}, 0
    for number, held in enumerate(files):
        name = f"model-{number + 1:05d}-of-{len(files):05d}.safetensors"
        total += _write_file(beside / name, held, (seed, number))
        weight_map |= {PREFIX + spec.name: name for spec in held}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json_atomic(beside / "model.safetensors.index.json", index)
    beside.replace(out)
    return total


def _write_small_files(folder: Path, config: dict[str, Any], family: str) -> None:
    write_json_atomic(folder / "config.json", config)
    write_json_atomic(folder / "generation_config.json", GENERATION)
    write_tokenizer(folder, "gemma4", config["text_config"]["vocab_size"])
    (folder / "chat_template.jinja").write_text(GEMMA4_TEMPLATE, encoding="utf-8")
    (folder / "README.md").write_text(
        f"# A slice of Gemma 4 {family}\n\nTrue widths, {config['text_config']['num_hidden_layers']} layers, "
        "random weights; made by `scripts/make-slice` to measure with. It answers nonsense.\n",
        encoding="utf-8",
    )


def _bytes(spec: ParameterSpec) -> int:
    return math.prod(spec.shape) * ITEM_BYTES


def _split(specs: list[ParameterSpec], limit: int) -> list[list[ParameterSpec]]:
    """The tensors over files of at most `limit` bytes each, in order."""
    files: list[list[ParameterSpec]] = [[]]
    used = 0
    for spec in specs:
        if files[-1] and used + _bytes(spec) > limit:
            files.append([])
            used = 0
        files[-1].append(spec)
        used += _bytes(spec)
    return files


def _write_file(path: Path, specs: list[ParameterSpec], seed: tuple[int, int]) -> int:
    """One safetensors file, its blocks drawn and written by two threads; bytes of its tensors."""
    header = safetensors_header({PREFIX + s.name: ("BF16", s.shape, _bytes(s)) for s in specs})
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.pwrite(handle, header, 0)
        offset, jobs = len(header), []
        with ThreadPoolExecutor(2) as pool:
            for number, spec in enumerate(specs):
                count = math.prod(spec.shape)
                for first in range(0, count, BLOCK):
                    where = offset + first * ITEM_BYTES
                    drawn = min(BLOCK, count - first)
                    key = (*seed, number, first // BLOCK)
                    jobs.append(pool.submit(_write_block, handle, where, spec, drawn, key))
                offset += _bytes(spec)
        for job in jobs:
            job.result()
        os.fsync(handle)
    finally:
        os.close(handle)
    return offset - len(header)


def _write_block(
    handle: int, offset: int, spec: ParameterSpec, count: int, key: tuple[int, ...]
) -> None:
    rng = np.random.Generator(np.random.SFC64(key))
    data = memoryview(_drawn(spec, count, rng)).cast("B")
    while data:
        done = os.pwrite(handle, data, offset)
        data, offset = data[done:], offset + done


def _drawn(spec: ParameterSpec, count: int, rng: np.random.Generator) -> NDArray[np.uint16]:
    """Values as bfloat16 bits: small tensors as the tests' tiny models have them, matrices by bits."""
    if len(spec.shape) == 1:
        return np.frombuffer(encode(values_of(spec, rng))[2], dtype=np.uint16)
    # Two bits of exponent below the top one: a root mean square of 0.88 times 2 ** top.
    gain = 2.0 if "embed_tokens" in spec.name else 1.0
    top = round(math.log2(gain / math.sqrt(spec.shape[-1])))
    words = rng.integers(0, 2**64 - 1, -(-count // 4), dtype=np.uint64, endpoint=True)
    bits: NDArray[np.uint16] = words.view(np.uint16)[:count]
    bits &= np.uint16(0x81FF)  # sign, two bits of exponent, seven of mantissa
    bits += np.uint16((127 + top - 3) << 7)
    return bits


if __name__ == "__main__":
    sys.exit(main())
