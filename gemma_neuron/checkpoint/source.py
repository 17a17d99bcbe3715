"""Where a checkpoint comes from, and its small files.

In: SOURCE as typed. Out: `Source`, its config, copies of what a port must carry.
Refused: what is no folder with a config.json; hub ids and s3:// for now (exit 2).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

from gemma_neuron.checkpoint.reading import BadJsonError, RefusedFileError
from gemma_neuron.checkpoint.storage import FileStore, LocalFiles, read_json_object, read_small
from gemma_neuron.errors import CheckpointError, ConfigError, SourceNotFoundError, UsageError

CONFIG_NAME = "config.json"
ADAPTER_CONFIG_NAME = "adapter_config.json"
CONFIG_LIMIT = 4 * 1024 * 1024
SMALL_FILE_LIMIT = 128 * 1024 * 1024
"""Gemma's tokenizer.json is the largest, about 33 MB."""
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
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A checkpoint at hand. `uri` is as given; `revision` is a hub snapshot's commit, else empty.

    `folder` holds the small files; `files` has all, those that were not downloaded by ranges.
    """

    kind: Literal["folder", "hub", "s3"]
    uri: str
    folder: Path
    files: FileStore
    revision: str = ""


def open_source(text: str) -> Source:
    """The source named by `text`. Raises UsageError (not yet) or SourceNotFoundError."""
    if not text.strip():
        raise UsageError("SOURCE is empty.", "Name the checkpoint's folder.")
    if text.startswith("s3://"):
        raise UsageError(
            f"{text}: checkpoints on S3 cannot be read yet.",
            "Copy it to a folder first: `aws s3 sync URI FOLDER`.",
        )
    folder = Path(text).expanduser().absolute()
    try:
        return _open_folder(text, folder)
    except OSError as error:
        raise SourceNotFoundError(
            f"{text} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error


def _open_folder(text: str, folder: Path) -> Source:
    if not folder.exists():
        if HUB_ID.fullmatch(text) and not folder.parent.exists():
            raise UsageError(
                f"There is no folder {text}, and hub ids cannot be read yet.",
                f"Fetch it first: `hf download {text.partition('@')[0]} --local-dir FOLDER`.",
            )
        raise SourceNotFoundError(
            f"There is no folder {text}.", "Check the path of the checkpoint."
        )
    if not folder.is_dir():
        raise SourceNotFoundError(
            f"{text} is a file; a folder with {CONFIG_NAME} and *.safetensors is needed.",
            f"Name the folder: {folder.parent}",
        )
    # A LoRA or GGUF folder may lack config.json: it is let in so that the audit can say what it is.
    if not (folder / CONFIG_NAME).is_file() and not _known_refusal(folder):
        snapshots = sorted(folder.glob("snapshots/*"))
        raise SourceNotFoundError(
            f"{text} has no {CONFIG_NAME}: it is no Hugging Face checkpoint folder"
            f" ({_found_in(folder)}).",
            f"This is a hub cache entry; name its snapshot: {snapshots[-1]}"
            if snapshots
            else "Name the folder that holds config.json, tokenizer.json and *.safetensors.",
        )
    return Source(
        kind="folder",
        uri=text,
        folder=folder,
        files=LocalFiles(folder),
        revision=_snapshot_commit(folder),
    )


def _known_refusal(folder: Path) -> bool:
    return (folder / CONFIG_NAME).is_symlink() or any(
        path.name == ADAPTER_CONFIG_NAME or path.suffix == ".gguf" for path in folder.iterdir()
    )


def _found_in(folder: Path) -> str:
    names = sorted(path.name for path in folder.iterdir())
    return f"found {', '.join(names[:5])}" + (" …" if len(names) > 5 else "") if names else "empty"


def _snapshot_commit(folder: Path) -> str:
    real = folder.resolve()
    is_snapshot = real.parent.name == "snapshots" and re.fullmatch(r"[0-9a-f]{40}", real.name)
    return real.name if is_snapshot else ""


def read_config(source: Source) -> dict[str, Any]:
    """The parsed config.json. Raises ConfigError with line and column where it is no JSON."""
    try:
        return read_json_object(source.files, CONFIG_NAME, CONFIG_LIMIT)
    except FileNotFoundError as error:
        raise ConfigError(
            f"{source.uri} has no {CONFIG_NAME}.", "Fetch the checkpoint's own config.json."
        ) from error
    except BadJsonError as error:
        raise ConfigError(
            f"{source.uri}: {CONFIG_NAME}, {error}.", "Fetch the checkpoint's own config.json."
        ) from error
    except RefusedFileError as error:
        raise ConfigError(f"{source.uri}: {error.message}", error.hint) from error


def read_optional_json(source: Source, name: str) -> dict[str, Any] | None:
    """A small JSON object beside the config, or None without it. Raises ConfigError if it is broken."""
    try:
        return read_json_object(source.files, name, SMALL_FILE_LIMIT)
    except FileNotFoundError:
        return None
    except (BadJsonError, RefusedFileError) as error:
        raise ConfigError(
            f"{source.uri}: {name}, {error}.", f"Fetch the checkpoint's own {name}."
        ) from error


def small_file_names(source: Source) -> list[str]:
    """Names in the folder that a port carries, sorted."""
    return [
        name
        for name in source.files.names()
        if any(fnmatchcase(name.lower(), pattern) for pattern in SMALL_FILES)
        and not name.lower().endswith(WEIGHT_SUFFIXES)
        and not (source.folder / name).is_dir()
    ]


def copy_small_files(source: Source, destination: Path) -> list[str]:
    """Copy config, tokenizer, template and licence files verbatim, fsynced; the names copied."""
    from gemma_neuron.artifacts import write_atomic

    destination.mkdir(parents=True, exist_ok=True)
    names = small_file_names(source)
    for name in names:
        try:
            data = read_small(source.files, name, SMALL_FILE_LIMIT)
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{source.uri}: {name} is a link to a file that is not there.",
                "Fetch the file again.",
            ) from error
        write_atomic(destination / name, data)
    return names


def config_digest(source: Source) -> str:
    """blake3 of config.json's bytes: the `config` fingerprint of a port."""
    from blake3 import blake3

    return blake3(read_small(source.files, CONFIG_NAME, CONFIG_LIMIT)).hexdigest()


def prompt_digest(source: Source) -> str:
    """blake3 over names and bytes of all PROMPT_FILES there are: the `prompt` fingerprint of a port."""
    from blake3 import blake3

    hasher = blake3()
    there = set(source.files.names())
    for name in PROMPT_FILES:
        if name in there:
            data = read_small(source.files, name, SMALL_FILE_LIMIT)
            hasher.update(f"{name}\n{len(data)}\n".encode())
            hasher.update(data)
    return hasher.hexdigest()
