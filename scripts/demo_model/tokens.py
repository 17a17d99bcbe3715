"""The demo model's tokenizer: Gemma 4's special ids, byte fallback, a small learned vocabulary.

Spaces stay spaces (no replacement character), so that every string comes back unchanged, and a
line break is always the one token 107, as in Gemma.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

NAMED = {
    0: "<pad>", 1: "<eos>", 2: "<bos>", 3: "<unk>", 4: "<mask>",
    46: "<|tool>", 47: "<tool|>", 48: "<|tool_call>", 49: "<tool_call|>",
    50: "<|tool_response>", 51: "<tool_response|>", 52: '<|"|>', 98: "<|think|>",
    100: "<|channel>", 101: "<channel|>", 105: "<|turn>", 106: "<turn|>",
}  # fmt: skip
NEWLINE_ID = 107
TURN_END = 106
STOP_IDS = (1, 106, 50)
# Line breaks alone, words with their leading space, single digits, runs of punctuation.
SPLIT = r"\n| ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|[^\S\n]"


def special_tokens() -> list[str]:
    """Ids 0 to 106 in order; what Gemma keeps for other modalities is unused here."""
    unused = 0
    names = []
    for index in range(NEWLINE_ID):
        name = NAMED.get(index)
        if name is None:
            name, unused = f"<unused{unused}>", unused + 1
        names.append(name)
    return names


def train_tokenizer(corpus: Sequence[str], size: int) -> Tokenizer:
    """Learn merges from ``corpus`` and lay the vocabulary out as Gemma does below id 108."""
    head = [*special_tokens(), "\n", *(f"<0x{byte:02X}>" for byte in range(256))]
    alphabet = [chr(code) for code in range(32, 127)]
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=head,
        initial_alphabet=alphabet,
        limit_alphabet=len(alphabet) + 1,
        show_progress=False,
    )
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    learner.train_from_iterator(corpus, trainer)
    learned = json.loads(learner.to_str())["model"]
    vocabulary: dict[str, int] = learned["vocab"]
    for index in range(len(vocabulary), size):
        vocabulary[f"<spare{index}>"] = index
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = Tokenizer(
        models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(special_tokens())
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """BOS is the template's to write, as in Gemma 4's -it models."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "add_eos_token": False,
        "bos_token": "<bos>",
        "eos_token": "<eos>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "model_max_length": 1024,
    }


def write_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Write both tokenizer files."""
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=2) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")
