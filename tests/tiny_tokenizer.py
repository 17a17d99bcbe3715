"""A small real tokenizer in Gemma's form: byte-fallback BPE, spaces as `▁`, special tokens at their ids."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

# Below id 110 as in Gemma's own vocabularies (real-world notes, section 5); 105/106 mean different text
# in the two families.
SPECIAL = {
    "gemma3": {
        0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
        105: "<start_of_turn>", 106: "<end_of_turn>",
    },
    "gemma4": {
        0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
        46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>",
        50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
        100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
    },
}  # fmt: skip
MERGES = (
    "t h", "i n", "e r", "a n", "o n", "r e", "▁ t", "▁ a", "▁t h", "▁th e", "an d", "in g",
    "▁ s", "▁ w", "e n", "o u", "▁ i", "▁i s", "e s", "a t",
)  # fmt: skip
FIRST_FREE = 107  # newline in both families


def vocabulary(family: str, size: int) -> dict[str, int]:
    """Exactly `size` pieces: specials at their ids, newline at 107, bytes, ASCII, merges, unused."""
    pieces = ["\n", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    pieces += [chr(code) for code in range(33, 127)] + [m.replace(" ", "") for m in MERGES]
    if size < FIRST_FREE + len(pieces):
        raise ValueError(f"a vocabulary of {size} is too small; {FIRST_FREE + len(pieces)} needed")
    by_id = dict(SPECIAL[family])
    by_id |= {FIRST_FREE + i: piece for i, piece in enumerate(pieces)}
    return {by_id.get(i, f"<unused{i}>"): i for i in range(size)}


def write_tokenizer(folder: Path, family: str, size: int) -> None:
    """tokenizer.json and tokenizer_config.json; BOS is left to the template, as in -it models."""
    vocab = vocabulary(family, size)
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(
        [AddedToken(text, normalized=False) for text in SPECIAL[family].values()]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "GemmaTokenizer",
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
