"""What `mirror` prints: lines for people, and the document of the JSON contract."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemma_neuron.render import size

if TYPE_CHECKING:
    from gemma_neuron.mirror.check import Checked
    from gemma_neuron.mirror.pull import Pulled
    from gemma_neuron.mirror.push import Counts

Shown = tuple[dict[str, Any], list[str]]


def pushed(counts: Counts, owner: str) -> Shown:
    fields = _fields(
        counts.total,
        counts.bytes,
        owner,
        uploaded=counts.uploaded,
        verified=counts.verified,
    )
    read = f", {counts.verified} of them read" if counts.verified else ""
    return fields, [
        f"{counts.uploaded} of {counts.total} objects uploaded, {size(counts.bytes)}; "
        f"the others were there{read}"
    ]


def pulled(counts: Pulled, port: Path, digest: str) -> Shown:
    """`digest`: of the port; empty where it is not whole."""
    fields = _fields(
        counts.total,
        counts.bytes,
        None,
        downloaded=counts.downloaded,
        verified=counts.verified,
        bad=counts.bad,
    )
    lines = [
        f"{counts.downloaded} of {counts.total} files downloaded into {port}, {size(counts.bytes)}; "
        f"{counts.verified} verified"
    ]
    if digest:
        fields["digest"] = digest
        lines.append(f"digest {digest}")
    return fields, lines + _bad(counts.bad)


def checked(found: Checked, where: str) -> Shown:
    owner = None if found.owner is None else str(found.owner)
    fields = _fields(found.total, found.bytes, owner, verified=found.verified, bad=found.bad)
    fields["sets"] = found.sets
    state = "nobody has written here"
    if found.owner is not None:
        ended = "ended" if found.owner.released else f"{found.owner_age_seconds:.0f} s ago"
        state = f"last written by {found.owner} ({ended})"
    lines = [f"{where}: {state}"]
    lines += [f"{name}: {count} file{'s' * (count != 1)}" for name, count in found.sets.items()]
    lines.append(
        f"{found.total} files, {size(found.bytes)}"
        + (f", {found.verified} verified" if found.verified else "")
    )
    return fields, lines + _bad(found.bad)


def _bad(bad: dict[str, str]) -> list[str]:
    return [f"BAD {name}: {why}" for name, why in bad.items()]


def _fields(
    total: int,
    count: int,
    owner: str | None,
    *,
    uploaded: int = 0,
    downloaded: int = 0,
    verified: int = 0,
    bad: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "objects": {
            "total": total,
            "uploaded": uploaded,
            "downloaded": downloaded,
            "verified": verified,
            "bad": len(bad or {}),
        },
        "bad": bad or {},
        "bytes": count,
        "owner": owner,
    }
