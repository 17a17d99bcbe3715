"""Goldens: what stock transformers says to a set of prompts, kept as a file with its provenance.

In: a checkpoint folder and GoldenPrompts. Out: `Golden`, one safetensors and one JSON beside it, committed
together. Refused on loading: one that stock transformers did not make, or of another checkpoint or
template.

The tensors are `golden_tensors`' matter.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gemma_neuron.artifacts import (
    PARTIAL_SUFFIX,
    CommittedSet,
    digest_file,
    digest_json,
    write_json_atomic,
    writing_failed,
)
from gemma_neuron.errors import IntegrityError, ReferenceUnavailableError
from gemma_neuron.validation.golden_noise import Noise, beyond_belief
from gemma_neuron.validation.golden_tensors import (
    GoldenGreedy,
    GoldenText,
    largest_id,
    largest_logit,
    read_tensors,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT_VERSION: Literal[3] = 3
PRODUCER = "transformers "


class PromptRecord(BaseModel):
    """What was asked, for a reader; the ids are in the tensors. `text`: as rendered, "" for a plain text."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: Literal["text", "greedy"]
    tokens: int
    limit: int = 0
    text: str = ""


class Provenance(BaseModel):
    """What a golden was made from and by; the JSON beside the tensors."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    format: Literal[3] = FORMAT_VERSION
    key: str
    producer: dict[str, str]
    """`producer` ("transformers <version>"), torch, class, attention, experts, dtype, device,
    layers_in_memory."""
    checkpoint_digest: str
    template_sha256: str
    files: dict[str, str]
    """Weight file → blake3 of the checkpoint it was made from."""
    prompts_digest: str
    prompts: tuple[PromptRecord, ...]
    seed: int
    sanity_loss: float = Field(ge=0)
    shuffled_loss: float = Field(ge=0)
    sanity_tokens: int
    noise: Noise | None = None


@dataclass(frozen=True, slots=True)
class Golden:
    """A loaded golden; `path` is its safetensors file, `reused` whether it was there before this run."""

    path: Path
    provenance: Provenance
    texts: dict[str, GoldenText]
    greedy: dict[str, GoldenGreedy]
    reused: bool = True

    @property
    def digest(self) -> str:
        return self.path.stem

    def require_vocabulary(self, vocab: int) -> None:
        """Raise IntegrityError when it speaks of other tokens than a port with so many has."""
        largest = largest_id(self.texts, self.greedy)
        widths = {text.values.shape[1] for text in self.texts.values() if text.top_ids is None}
        if largest >= vocab or not widths <= {vocab}:
            raise IntegrityError(
                f"{self.path} holds token ids up to {largest} and rows of {sorted(widths)} logits; the port has "
                f"{vocab} tokens.",
                "Make the golden from the checkpoint this port was compiled from.",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldenIdentity:
    """Of what a golden must be; `key` is its file's name."""

    checkpoint_digest: str
    template_sha256: str
    prompts_digest: str
    dtype: str
    noise_dtype: str | None
    files: dict[str, str]
    """Weight file → blake3, as the port's source.json has them; empty when it has none."""
    experts: bool = False
    """Whether the model routes tokens to experts: how much noise is believed. No part of the key."""

    @property
    def key(self) -> str:
        """Also holds the versions that decide the reference's numbers."""
        from importlib.metadata import version

        facts = {
            "format": FORMAT_VERSION,
            "checkpoint": self.checkpoint_digest,
            "files": self.files,
            "template": self.template_sha256,
            "prompts": self.prompts_digest,
            "dtype": self.dtype,
            "noise": self.noise_dtype,
            "transformers": version("transformers"),
            "torch": version("torch"),
        }
        return digest_json(facts)[:32]


def save_golden(
    folder: Path, provenance: Provenance, tensors: dict[str, NDArray[Any]], stem: str | None = None
) -> Path:
    """Write and commit `<stem>.safetensors` + `.json`; the safetensors path. Raises EnvironmentProblem (disk)."""
    stem = stem or provenance.key
    file = folder / f"{stem}.safetensors"
    partial = file.with_name(file.name + PARTIAL_SUFFIX)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        committed = CommittedSet(folder, stem)
        committed.withdraw()
        _save(tensors, partial)
        partial.replace(file)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise writing_failed(file, error) from error
    write_json_atomic(folder / f"{stem}.json", provenance.model_dump(mode="json"))
    committed.commit([file.name, f"{stem}.json"], {"key": provenance.key})
    return file


def _save(tensors: dict[str, NDArray[Any]], path: Path) -> None:
    """A safetensors file, on the disk. Raises OSError: safetensors says the system's error in words alone."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        save_file(tensors, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code)) from error
    with path.open("rb") as handle:
        os.fsync(handle.fileno())


def golden_path(path: Path) -> Path:
    """The safetensors file of a golden named with or without its suffix. Raises ReferenceUnavailableError."""
    path = path if path.suffix == ".safetensors" else path.with_name(path.name + ".safetensors")
    if not path.is_file():
        raise ReferenceUnavailableError(
            f"There is no golden {path}.", "Make one with `gemma-neuron golden SOURCE --out FILE`."
        )
    return path


def load_golden(path: Path, identity: GoldenIdentity | None = None) -> Golden:
    """Read a golden's safetensors file (or folder member named without suffix).

    Raises IntegrityError when it is not what its marker vouches for, or is of another checkpoint or
    template than `identity`; ReferenceUnavailableError when stock transformers did not make it.
    """
    path = golden_path(path)
    committed = CommittedSet(path.parent, path.stem)
    if committed.manifest() is None:
        raise IntegrityError(
            f"{path} is not whole: {committed.marker_path.name} is missing beside it.",
            f"A golden is four files: copy all of {path.stem}.*, or make it again.",
        )
    committed.verify()
    try:
        provenance = Provenance.model_validate_json(path.with_suffix(".json").read_bytes())
    except (OSError, ValidationError) as error:
        raise IntegrityError(
            f"{path.with_suffix('.json')} is not a golden's provenance of format {FORMAT_VERSION}: {error}",
            "Make the golden again.",
        ) from error
    _refuse_other(path, provenance, identity)
    texts, greedy = read_tensors(path)
    _refuse_noise(path, provenance.noise, texts, experts=identity is not None and identity.experts)
    return Golden(path, provenance, texts, greedy)


def _refuse_noise(
    path: Path, noise: Noise | None, texts: dict[str, GoldenText], *, experts: bool
) -> None:
    found = noise and beyond_belief(noise, largest_logit(texts.values()), experts=experts)
    if noise and found:
        raise IntegrityError(
            f"{path}: the noise it gives for {noise.dtype} is {found}, more than a model of its kind has. Bars "
            "widened by it would pass any port.",
            "Make the golden again.",
        )


def _refuse_other(path: Path, provenance: Provenance, identity: GoldenIdentity | None) -> None:
    maker = provenance.producer.get("producer", "")
    if not maker.startswith(PRODUCER):
        raise ReferenceUnavailableError(
            f"{path} was made by {maker or 'nobody known'}, not by stock transformers: a port compared "
            "with its own code agrees with its own faults.",
            "Make a golden with `gemma-neuron golden SOURCE --out FILE`.",
        )
    if identity is None:
        return
    pairs = [
        ("checkpoint", provenance.checkpoint_digest, identity.checkpoint_digest),
        ("chat template", provenance.template_sha256, identity.template_sha256),
    ]
    if identity.files and provenance.files:
        pairs.append(("weight files", digest_json(provenance.files), digest_json(identity.files)))
    for what, found, needed in pairs:
        if found != needed:
            raise IntegrityError(
                f"{path} was made from another {what}: found {found[:16] or 'none'}, the port has "
                f"{needed[:16] or 'none'}.",
                "Make the golden from the checkpoint this port was compiled from.",
            )


def weight_digests(folder: Path) -> dict[str, str]:
    """Weight file → blake3 of a checkpoint folder."""
    return {file.name: digest_file(file) for file in sorted(folder.glob("*.safetensors"))}
