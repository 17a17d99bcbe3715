"""Writes the files of npm releases that are kept in this repository, with licences and digests.

In: the releases below, by `npm pack`. Out: one folder each with `versions.json`. `--check` writes nothing.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One package. `file` is what is kept of it; `bundled` are the packages whose code is inside that file."""

    name: str
    version: str
    licence: str
    file: str
    bundled: tuple[tuple[str, str, str], ...] = ()
    """Name, version, licence."""
    licence_files: tuple[str, ...] = ("LICENSE",)


PAGE = (
    Release(
        name="markdown-it",
        version="15.0.3",
        licence="MIT",
        file="dist/browser/markdown-it.umd.min.js",
        bundled=(
            ("entities", "8.1.0", "BSD-2-Clause"),
            ("linkify-it", "6.1.0", "MIT"),
            ("mdurl", "2.1.0", "MIT"),
            ("punycode.js", "2.3.1", "MIT"),
            ("uc.micro", "3.0.0", "MIT"),
        ),
    ),
    Release(
        name="dompurify",
        version="3.5.0",
        licence="MPL-2.0 OR Apache-2.0",
        file="dist/purify.min.js",
    ),
)
AXE = (
    Release(
        name="axe-core",
        version="4.14.1",
        licence="MPL-2.0",
        file="axe.min.js",
        licence_files=("LICENSE", "LICENSE-3RD-PARTY.txt"),
    ),
)
FOLDERS = {
    ROOT / "gemma_neuron" / "data" / "page" / "vendor": PAGE,
    ROOT / "tests" / "data" / "axe": AXE,
}


def packed(name: str, version: str, scratch: Path) -> tuple[tarfile.TarFile, str]:
    """A release's archive and its digest as the registry gives it; npm has compared the two."""
    command = ["npm", "pack", f"{name}@{version}", "--json", "--ignore-scripts"]
    done = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"error: {name} {version} could not be fetched: {done.stderr.strip()[-400:]}")
    found = json.loads(done.stdout)[0]
    return tarfile.open(scratch / found["filename"]), found["integrity"]


def read(archive: tarfile.TarFile, name: str) -> bytes:
    """A file of a release, whose folder is not always called `package`."""
    for member in archive.getmembers():
        if member.isfile() and member.name.partition("/")[2].lower() == name.lower():
            opened = archive.extractfile(member)
            assert opened is not None
            return opened.read()
    sys.exit(f"error: {archive.name} has no file {name}")


def licence_text(archive: tarfile.TarFile) -> bytes:
    names = [member.name.partition("/")[2] for member in archive.getmembers()]
    return read(archive, next(name for name in names if name.upper().startswith("LICEN")))


def files_of(release: Release, scratch: Path) -> tuple[dict[str, bytes], dict[str, Any]]:
    """A release's files by the name they get here, and its entry in versions.json."""
    archive, integrity = packed(release.name, release.version, scratch)
    parts = [read(archive, name) for name in release.licence_files]
    for name, version, licence in release.bundled:
        inner, _ = packed(name, version, scratch)
        parts.append(f"{name} ({licence}), inside this file:\n\n".encode() + licence_text(inner))
    rule = b"\n" + b"-" * 80 + b"\n\n"
    files = {
        Path(release.file).name: read(archive, release.file),
        f"{release.name}.LICENSE.txt": rule.join(part.strip() + b"\n" for part in parts),
    }
    entry = {
        "name": release.name,
        "version": release.version,
        "licence": release.licence,
        "integrity": integrity,
        "source": release.file,
        "bundled": [name for name, _, _ in release.bundled],
        "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()},
    }
    return files, entry


def wanted(releases: tuple[Release, ...], scratch: Path) -> dict[str, bytes]:
    files: dict[str, bytes] = {}
    entries = []
    for release in releases:
        own, entry = files_of(release, scratch)
        files |= own
        entries.append(entry)
    text = json.dumps({"packages": entries}, indent=2) + "\n"
    return files | {"versions.json": text.encode()}


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        print("error: the only argument is --check", file=sys.stderr)
        return 2
    different = 0
    for folder, releases in FOLDERS.items():
        with tempfile.TemporaryDirectory() as scratch:
            files = wanted(releases, Path(scratch))
        for name, data in files.items():
            path = folder / name
            same = path.is_file() and path.read_bytes() == data
            different += not same
            print(
                f"{'same' if same else 'differs' if check else 'written'} {path.relative_to(ROOT)}"
            )
            if not same and not check:
                folder.mkdir(parents=True, exist_ok=True)
                path.write_bytes(data)
    return 5 if check and different else 0


if __name__ == "__main__":
    sys.exit(main())
