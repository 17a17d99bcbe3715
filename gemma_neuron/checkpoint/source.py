"""Where a checkpoint comes from, and its small files.

In: SOURCE as typed. Out: `Source`, its config, copies of what a port must carry.
Refused: what is neither a folder with a config.json nor a hub id. An s3:// URI is opened by the pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gemma_neuron.checkpoint.selection import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    PROMPT_FILES,
    is_small_file,
)
from gemma_neuron.checkpoint.storage import FileStore, LocalFiles, read_json_object, read_small
from gemma_neuron.errors import ConfigError, SourceChangedError, SourceNotFoundError
from gemma_neuron.names import path_of
from gemma_neuron.regular_files import RefusedFileError
from gemma_neuron.strict_json import BadJsonError

CONFIG_LIMIT = 4 * 1024 * 1024
SMALL_FILE_LIMIT = 128 * 1024 * 1024
"""Gemma's tokenizer.json is the largest, about 33 MB."""
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

    def __str__(self) -> str:
        """Where the bytes are to be had again, on this machine or another."""
        if self.kind == "folder":
            return str(self.folder.resolve())
        return f"{self.uri.partition('@')[0]}@{self.revision}" if self.revision else self.uri


def open_source(
    text: str, tell: Callable[[str], None] = lambda _: None, *, config_only: bool = False
) -> Source:
    """The folder or hub repository named by `text`; of a repository the small files are downloaded.

    `config_only`: config.json alone. `tell` gets lines for the user. Raises UsageError, SourceNotFoundError, and
    for the hub AccessError, NetworkError and DiskFullError.
    """
    folder = path_of(text).absolute()
    if HUB_ID.fullmatch(text) and not folder.exists():
        from gemma_neuron.checkpoint.hub.opening import open_hub
        from gemma_neuron.checkpoint.remote import open_remote

        return open_remote(open_hub(text, tell), config_only=config_only)
    try:
        return _open_folder(text, folder)
    except OSError as error:
        raise SourceNotFoundError(
            f"{text} cannot be read: {error.strerror}.", "Check the path and its permissions."
        ) from error


def _open_folder(text: str, folder: Path) -> Source:
    if not folder.exists():
        raise SourceNotFoundError(
            f"There is no folder {text}, and it is no hub id (org/name[@revision]).",
            "Check the path of the checkpoint.",
        )
    if not folder.is_dir():
        raise SourceNotFoundError(
            f"{text} is a file; a folder with {CONFIG_NAME} and *.safetensors is needed.",
            f"Name the folder: {folder.parent}",
        )
    # A LoRA or GGUF folder may lack config.json: it is let in so that the audit can say what it is.
    if not (folder / CONFIG_NAME).is_file() and not _known_refusal(folder):
        if (folder / CONFIG_NAME).exists():
            what = "a folder" if (folder / CONFIG_NAME).is_dir() else "no regular file"
            raise SourceNotFoundError(
                f"{folder / CONFIG_NAME} is {what}; the model's configuration as JSON is needed.",
                "Fetch the checkpoint's own config.json.",
            )
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
        if is_small_file(name) and not (source.folder / name).is_dir()
    ]


def read_small_files(source: Source) -> dict[str, bytes]:
    """Name → bytes of config, tokenizer, template and licence files: a port's `source/`.

    Raises SourceChangedError when one that was listed is gone, CheckpointError when one may not be read.
    """
    found = {}
    for name in small_file_names(source):
        try:
            found[name] = read_small(source.files, name, SMALL_FILE_LIMIT)
        except FileNotFoundError as error:
            raise SourceChangedError(
                f"{source.uri}: {name} went away while it was read.", "Fetch the file again."
            ) from error
    return found


def write_small_files(files: dict[str, bytes], destination: Path) -> list[str]:
    """Write a port's `source/` verbatim, fsynced; the names."""
    from gemma_neuron.artifacts import write_atomic

    destination.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        write_atomic(destination / name, data)
    return list(files)


def config_digest(files: dict[str, bytes]) -> str:
    """blake3 of config.json's bytes: the `config` fingerprint of a port."""
    from blake3 import blake3

    return blake3(files[CONFIG_NAME]).hexdigest()


def prompt_digest(files: dict[str, bytes]) -> str:
    """blake3 over names and bytes of all PROMPT_FILES there are: the `prompt` fingerprint of a port."""
    from blake3 import blake3

    hasher = blake3()
    for name in PROMPT_FILES:
        if name in files:
            hasher.update(f"{name}\n{len(files[name])}\n".encode())
            hasher.update(files[name])
    return hasher.hexdigest()
