"""A Gemma 3 text checkpoint as a GGUF file with the same weights in the same bits, for llama.cpp.

In: a folder with config.json, tokenizer.json and *.safetensors in bfloat16. Matrices are written as they are, or in
float32 without loss; norms in float32 with the 1 that Gemma adds to them. Refused: another architecture, a tensor that
has no name in GGUF, one that is missing.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors import safe_open

ARCHITECTURE = "Gemma3ForCausalLM"
BOS, EOS, PAD, UNKNOWN = 2, 1, 0, 3
TENSORS_A_LAYER = 13
QUANTIZATION = {
    "bfloat16": (gguf.GGMLQuantizationType.BF16, gguf.LlamaFileType.MOSTLY_BF16),
    "float32": (gguf.GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--dtype", default="bfloat16", choices=QUANTIZATION)
    asked = parser.parse_args()
    write_gguf(asked.source, asked.out, asked.dtype)
    return 0


def write_gguf(source: Path, out: Path, dtype: str) -> None:
    """Write `out`, whole or not at all. Raises SystemExit for a checkpoint that it does not know."""
    config = json.loads((source / "config.json").read_text())
    if config.get("architectures") != [ARCHITECTURE]:
        raise SystemExit(f"error: {source} is {config.get('architectures')}, not {ARCHITECTURE}")
    partial = out.with_name(out.name + ".partial")
    writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH.GEMMA3])
    _add_geometry(writer, config)
    writer.add_file_type(QUANTIZATION[dtype][1])
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    _add_tokenizer(writer, tokenizer, config["vocab_size"])
    _add_tensors(writer, source, config["num_hidden_layers"], dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(out)


def _add_geometry(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "rope_scaling"):
        if config.get(name) is not None:
            raise SystemExit(f"error: {name} is not written to GGUF")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(config["vocab_size"])


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: dict[str, Any], count: int) -> None:
    """As a sentencepiece model: a piece's score is the rank of the first merge that makes it, the earliest the best."""
    model = tokenizer["model"]
    scores: dict[str, float] = {}
    for rank, merge in enumerate(model["merges"]):
        left, right = merge if isinstance(merge, list) else merge.split(" ")
        scores.setdefault(left + right, -float(rank))
    added = {entry["id"]: entry for entry in tokenizer["added_tokens"]}
    pieces = {id_: piece for piece, id_ in model["vocab"].items()}
    pieces |= {id_: entry["content"] for id_, entry in added.items()}
    known = [pieces.get(id_, f"[none{id_}]") for id_ in range(count)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(known)
    writer.add_token_scores([scores.get(piece, -float(len(model["merges"]))) for piece in known])
    writer.add_token_types([_kind(id_, piece, added) for id_, piece in enumerate(known)])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_unk_token_id(UNKNOWN)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)


def _kind(id_: int, piece: str, added: dict[int, dict[str, Any]]) -> int:
    if id_ == UNKNOWN:
        return gguf.TokenType.UNKNOWN
    if id_ in added:
        special = added[id_]["special"]
        return gguf.TokenType.CONTROL if special else gguf.TokenType.USER_DEFINED
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        return gguf.TokenType.BYTE
    return gguf.TokenType.UNUSED if piece == f"[none{id_}]" else gguf.TokenType.NORMAL


def _add_tensors(writer: gguf.GGUFWriter, source: Path, layers: int, dtype: str) -> None:
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, layers)
    written = 0
    for path in sorted(source.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for theirs in file.keys():  # noqa: SIM118 - a file is no mapping
                ours = names.get_name(theirs, try_suffixes=(".weight",))
                if ours is None:
                    raise SystemExit(f"error: {theirs} has no name in GGUF")
                _add_tensor(writer, ours, theirs, file.get_tensor(theirs), dtype)
                written += 1
    needed = layers * TENSORS_A_LAYER + 2
    if written != needed:
        raise SystemExit(f"error: {source} has {written} tensors, {needed} are needed")


def _add_tensor(
    writer: gguf.GGUFWriter, name: str, theirs: str, values: torch.Tensor, dtype: str
) -> None:
    if theirs.endswith("norm.weight"):
        writer.add_tensor(name, 1.0 + values.float().numpy())
    elif dtype == "bfloat16" and values.dtype == torch.bfloat16:
        data: np.ndarray[Any, Any] = values.contiguous().view(torch.uint8).numpy()
        writer.add_tensor(name, data, raw_dtype=QUANTIZATION[dtype][0])
    elif dtype == "float32":
        writer.add_tensor(name, values.float().numpy())
    else:
        raise SystemExit(f"error: {theirs} is {values.dtype}, and would lose bits as {dtype}")


if __name__ == "__main__":
    sys.exit(main())
