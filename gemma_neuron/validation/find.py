"""Which golden a validation uses: the one named, the one the port has, or a new one from the checkpoint.

In: the port's identity. Out: Golden, or None when there is neither golden nor checkpoint. Refused: a
checkpoint whose config or weight files are not those the port was made from (IntegrityError).
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.artifacts import CommittedSet, digest_file
from gemma_neuron.errors import GemmaNeuronError, IntegrityError
from gemma_neuron.source_entries import source_entries
from gemma_neuron.validation.golden import Golden, GoldenIdentity, load_golden, weight_digests
from gemma_neuron.validation.make import FollowUp, make_golden
from gemma_neuron.validation.prompts import GoldenPrompts

if TYPE_CHECKING:
    from gemma_neuron.port import Port

OTHER_CHECKPOINT_HINT = (
    "Give the checkpoint this port was compiled from, or compile this one into a new port."
)
REFERENCE_DTYPE = "float32"
"""A bfloat16 port is held against float32 too, with the noise of stock bfloat16 measured beside it."""


def port_identity(port: Port, prompts_digest: str, template_sha256: str) -> GoldenIdentity:
    """Of what a golden for this port must be."""
    dtype = port.spec.dtype
    return GoldenIdentity(
        checkpoint_digest=port.record.fingerprints.checkpoint,
        template_sha256=template_sha256,
        prompts_digest=prompts_digest,
        dtype=REFERENCE_DTYPE,
        noise_dtype=dtype if dtype != REFERENCE_DTYPE else None,
        files=source_files(port),
        experts=port.geometry.experts is not None,
    )


def source_files(port: Port) -> dict[str, str]:
    """Weight file → blake3 from the port's source.json; empty when it names none."""
    return {entry.name: entry.blake3 for entry in source_entries(port) or () if entry.blake3}


def find_golden(
    folder: Path,
    identity: GoldenIdentity,
    *,
    checkpoint: Path | None,
    config: Path,
    prompts: GoldenPrompts,
    follow_up: FollowUp | None,
    progress: Callable[[str], None],
) -> Golden | None:
    """The golden to compare with; a new one is committed in `folder` under its key. `config`: the port's own."""
    out = folder / f"{identity.key}.safetensors"
    if CommittedSet(folder, identity.key).manifest() is not None:
        return load_golden(out, identity)
    if checkpoint is None:
        return _any_golden(folder, identity)
    refuse_other_config(checkpoint, config)
    refuse_other_weights(checkpoint, identity.files)
    return make_golden(checkpoint, prompts, identity, out, follow_up=follow_up, progress=progress)


def import_golden(given: Path, folder: Path, identity: GoldenIdentity, vocab: int) -> Golden:
    """Check the golden a user names, then keep it in the port, where later runs find it: under its key when it is just
    what would be made here, else under the digest of its file."""
    found = load_golden(given, identity)
    found.require_vocabulary(vocab)
    if found.path.parent.resolve() == folder.resolve():
        return found
    made = found.provenance
    same = made.key == identity.key and made.prompts_digest == identity.prompts_digest
    stem = identity.key if same else digest_file(found.path)[: len(identity.key)]
    folder.mkdir(parents=True, exist_ok=True)
    kept = CommittedSet(folder, stem)
    kept.withdraw()
    names = [f"{stem}{suffix}" for suffix in (".safetensors", ".json")]
    for name in names:
        shutil.copyfile(found.path.with_suffix(Path(name).suffix), folder / name)
    kept.commit(names, {"key": made.key})
    return load_golden(folder / names[0], identity)


def _any_golden(folder: Path, identity: GoldenIdentity) -> Golden | None:
    """The newest golden of this checkpoint and template, whatever its prompts."""
    files = sorted(
        folder.glob("*.safetensors"), key=lambda path: path.stat().st_mtime, reverse=True
    )
    for path in files:
        try:
            return load_golden(path, identity)
        except GemmaNeuronError:
            continue
    return None


def refuse_other_config(checkpoint: Path, config: Path) -> None:
    """The same weights under another config are another model: its reference would tell against a sound port.

    Token ids change none of its numbers: what a port lacks among its stop ids is level 0's to say.
    """
    theirs, own = (_without_token_ids(_json(path)) for path in (checkpoint / config.name, config))
    if theirs != own:
        raise IntegrityError(
            f"--checkpoint {checkpoint}: its config.json is not the one the port was made from.",
            OTHER_CHECKPOINT_HINT,
        )


def _without_token_ids(config: Any) -> Any:
    if not isinstance(config, dict):
        return config
    return {
        key: _without_token_ids(value)
        for key, value in config.items()
        if not key.endswith("_token_id")
    }


def _json(path: Path) -> Any:
    """None where it cannot be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def refuse_other_weights(checkpoint: Path, files: dict[str, str]) -> None:
    """Raise IntegrityError unless the folder's weight files are `files`, name → blake3; none says nothing."""
    found = weight_digests(checkpoint) if files else {}
    for name, needed in files.items():
        if found.get(name) != needed:
            raise IntegrityError(
                f"--checkpoint {checkpoint}: {name} has blake3 {found.get(name, 'none')[:16]}, the "
                f"port was made from {needed[:16]}.",
                OTHER_CHECKPOINT_HINT,
            )
