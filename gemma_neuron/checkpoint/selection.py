"""Which files of a checkpoint a text port takes, and which names are let near a file system.

In: names as a folder, a repository or a bucket lists them. Out: the small files, the weights in use.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from gemma_neuron.names import is_plain_file_name

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
INDEX_LIMIT = 100 * 1024 * 1024
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "validation.toml",
    "provenance.json",
    "*license*",
    "*licence*",
    "*notice*",
    "*terms*",
    "readme*",
    "*.md",
)
"""Copied verbatim into a port's `source/`; patterns are matched without regard to case. The chat template
is a file of its own in Gemma 4: a fetch that left it behind is how the original port lost its prompt."""
PROMPT_FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
)
"""What decides the ids a model is given and where it stops; sorted."""
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
OF_OTHER_FRAMEWORKS = (".msgpack", ".h5", ".keras", ".onnx", ".tflite", ".npz", ".ot", ".mlmodel")
WEIGHT_SUFFIXES = (
    ".safetensors", *PICKLED, *OF_OTHER_FRAMEWORKS, ".gguf", ".onnx_data", ".task", ".litertlm",
    ".zip", ".tar", ".gz",
)  # fmt: skip


def is_small_file(name: str) -> bool:
    """Whether a port carries a copy of it."""
    lower = name.lower()
    wanted = any(fnmatchcase(lower, pattern) for pattern in SMALL_FILES)
    return wanted and not lower.endswith(WEIGHT_SUFFIXES)


def is_weights(name: str) -> bool:
    """Whether it may hold the model's own tensors; an adapter's are another thing."""
    return name.endswith(".safetensors") and not name.startswith("adapter_")


def is_plain_weights_name(name: str) -> bool:
    """What an index may name."""
    return is_plain_file_name(name) and name.endswith(".safetensors")


def weights_in_use(present: Iterable[str], weight_map: dict[str, str] | None) -> list[str]:
    """The files that stock transformers would load: the index's, else the single one, else all there are."""
    if weight_map:
        return sorted(set(weight_map.values()))
    weights = sorted(name for name in present if is_weights(name))
    return [SINGLE_NAME] if SINGLE_NAME in weights else weights
