"""Ordinary text for the degenerate-output detector to leave alone: whatever packages put on a machine.

In: kinds, each a few folders with patterns of file names. Out: pieces of text cut at random lines, the same for one
seed and one machine. Nothing is downloaded; a kind of which the machine has nothing yields no piece.
"""

from __future__ import annotations

import fnmatch
import gzip
import os
import random
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gemma_neuron.tokenizer import Tokenizer

SHARE = Path("/usr/share")
STDLIB, SITE = (Path(sysconfig.get_paths()[name]) for name in ("stdlib", "purelib"))
LENGTHS = (64, 96, 128, 256, 512, 1024)
"""Tokens of a piece, in turn: from the validator's shortest answers that can loop to a long generation."""
CHARACTERS = 8
"""Read for each token wanted: more than any tokenizer needs."""
LEAST_BYTES, MOST_BYTES = 400, 4_000_000


@dataclass(frozen=True, slots=True)
class Kind:
    """Files by folder and pattern (`*` also crosses folders); `markup` is taken out of what is read."""

    name: str
    places: tuple[tuple[Path, str], ...]
    markup: str | None = None
    per_file: int = 3


MANUALS = tuple("cs da de es fi fr hu id it ja ko nl pl pt_BR ru sr sv tr uk zh_CN zh_TW".split())
ROFF = r"^[.\'].*$|\\f[A-Z]|\\[&%|^]|\\-"
DOC, MAN, DPKG = SHARE / "doc", SHARE / "man", Path("/var/lib/dpkg/info")
INCLUDE = Path("/usr/include")
FORTUNES, PERL, ZONES = SHARE / "games/fortunes", SHARE / "perl", SHARE / "zoneinfo"
KINDS = (
    Kind(
        "licences", ((SHARE / "common-licenses", "*"), (SITE, "*/LICENSE*"), (DOC, "*/copyright"))
    ),
    Kind("documentation", ((DOC, "*README*"), (DOC, "*.txt*"), (SITE, "*.md"), (SITE, "*.rst"))),
    Kind("manuals", ((MAN / "man1", "*"), (MAN / "man3", "*"), (MAN / "man5", "*")), ROFF),
    Kind("changelogs", ((DOC, "*/changelog*"), (DOC, "*/NEWS*"))),
    Kind("python", ((STDLIB, "*.py"), (SITE, "transformers/models/*.py"), (SITE, "torch/*.py"))),
    Kind("other code", ((INCLUDE, "*.h"), (SITE, "torch/*.h"), (PERL, "*.pm"), (SITE, "*.js"))),
    Kind(
        "lists", ((SHARE / "dict", "*"), (DPKG, "*.list"), (SHARE / "misc", "*"), (SITE, "*.txt"))
    ),
    Kind(
        "tables",
        ((ZONES, "*.tab"), (ZONES, "*.zi"), (SITE, "*.csv"), (SITE, "*.tsv"), (SITE, "*/RECORD")),
    ),
    Kind("data", ((SITE, "*.json"), (SITE, "*.yaml"), (SHARE / "xml", "*.xml"), (SITE, "*.toml"))),
    Kind(
        "poetry",
        tuple((FORTUNES, name) for name in ("song*", "literature", "de/gedichte", "zh/tang*")),
        per_file=20,
    ),
    Kind(
        "languages",
        (
            *((MAN / name, "*") for name in MANUALS),
            (STDLIB, "test/cjkencodings/*-utf8.txt"),
            (DPKG, "*.templates"),
            (FORTUNES, "??/*"),
        ),
        ROFF,
    ),
)
QUICK = (
    Kind("licences", ((SHARE / "common-licenses", "*"),)),
    Kind(
        "python",
        ((STDLIB / "email", "*.py"), (STDLIB / "asyncio", "*.py"), (SITE / "jinja2", "*.py")),
    ),
    Kind("manuals", tuple((MAN / name, "*") for name in ("de", "fr", "ja")), ROFF),
)
"""Kinds that are found and read in seconds; the second is on any machine."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids of one piece, where it is from, and how long it was meant to be."""

    kind: str
    source: str
    ids: tuple[int, ...]


def pieces(
    tokenizer: Tokenizer,
    per_kind: int,
    kinds: Sequence[Kind],
    *,
    seed: int = 1,
    more: Sequence[Path] = (),
) -> Iterator[Piece]:
    """Up to `per_kind` pieces of every kind. `more`: folders that stand for `/` too, with unpacked
    packages."""
    for kind in kinds:
        rng = random.Random(f"{seed} {kind.name}")
        files = _files(kind, more)
        rng.shuffle(files)
        count = 0
        for path in files:
            if count == per_kind:
                break
            text = _read(Path(path), kind.markup)
            for _ in range(kind.per_file if text else 0):
                if count == per_kind:
                    break
                ids = _cut(text, tokenizer, LENGTHS[count % len(LENGTHS)], rng)
                if ids:
                    count += 1
                    yield Piece(kind.name, path, tuple(ids))


def _files(kind: Kind, more: Sequence[Path]) -> list[str]:
    """Paths as strings: a machine has a hundred thousand of them."""
    found: set[str] = set()
    for folder, pattern in kind.places:
        for root in (Path("/"), *more):
            place = root / folder.relative_to("/")
            found.update(fnmatch.filter(_listing(place), f"{place}/{pattern}"))
    return sorted(found)


@cache
def _listing(folder: Path) -> list[str]:
    """Every file under a folder."""
    return [f"{path}/{name}" for path, _, names in os.walk(folder) for name in names]


def _read(path: Path, markup: str | None) -> str:
    """The file's text, "" for one that is none, short or huge."""
    if not path.is_file() or not LEAST_BYTES <= path.stat().st_size <= MOST_BYTES:
        return ""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = data.decode("utf-8")
    except (OSError, EOFError, UnicodeDecodeError):
        return ""
    if "\0" in text:
        return ""
    return re.sub(markup, "", text, flags=re.MULTILINE) if markup else text


def _cut(text: str, tokenizer: Tokenizer, length: int, rng: random.Random) -> list[int]:
    """Exactly `length` ids from a random line on; empty when the text has not so many there."""
    start = text.rfind("\n", 0, rng.randrange(max(1, len(text) - 2 * length))) + 1
    ids = tokenizer.encode(text[start : start + CHARACTERS * length])[:length]
    return ids if len(ids) == length else []
