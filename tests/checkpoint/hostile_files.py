"""Checkpoints whose files are broken or hostile: headers, offsets, indexes, names, links.

Each case edits a sound checkpoint in place and says which finding it must become.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.checkpoint.helpers import TEXT4
from tests.tiny import read_safetensors, write_safetensors, write_sharded

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = TEXT4 + "norm.weight"
SCALAR = TEXT4 + "layers.1.layer_scalar"


@dataclass(frozen=True, slots=True)
class Hostile:
    """`subject`: the tensor or file that the finding must name. `base`: which sound checkpoint is edited."""

    edit: Callable[[Path], object]
    kind: str
    subject: str
    base: str = "gemma4"
    values: bool = False


def header_edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Edit the header's JSON of the weights file; the bytes after it stay."""

    def edit(folder: Path) -> None:
        raw = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack_from("<Q", raw)
        header = json.loads(raw[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])

    return edit


def bytes_edit(change: Callable[[bytes], bytes], name: str = WEIGHTS) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return edit


def of_norm(**values: Any) -> Callable[[Path], None]:
    """Set fields of one tensor's entry in the header."""
    return header_edit(lambda header: header[NORM].update(values))


def rename(old: str, new: str) -> Callable[[Path], None]:
    return header_edit(lambda header: header.update({new: header.pop(old)}))


def moved(by: int) -> Callable[[Path], None]:
    return header_edit(
        lambda h: h[NORM].update(data_offsets=[n + by for n in h[NORM]["data_offsets"]])
    )


def sharded(change: Callable[[Path, list[str]], object]) -> Callable[[Path], None]:
    """Three files with an index, then the change (folder, names of the files)."""

    def edit(folder: Path) -> None:
        parts = write_sharded(folder, read_safetensors(folder / WEIGHTS))
        (folder / WEIGHTS).unlink()
        change(folder, parts)

    return edit


def index_edit(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path, _: list[str]) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index)
        (folder / INDEX).write_text(json.dumps(index))

    return sharded(edit)


def points_to(name: str) -> Callable[[Path], None]:
    return index_edit(lambda index: index["weight_map"].update({NORM: name}))


def link(target: str, name: str = WEIGHTS) -> Callable[[Path], None]:
    """`name` becomes a link; `{outside}` is a sound copy beside the folder."""

    def edit(folder: Path) -> None:
        outside = folder.parent / "outside"
        shutil.move(folder / name, outside)
        (folder / name).symlink_to(target.format(outside=outside))

    return edit


def special(make: Callable[[Path], object], name: str = WEIGHTS) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return edit


def _socket(path: Path) -> None:
    here = Path.cwd()
    os.chdir(path.parent)  # a socket's address has room for 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _twice(folder: Path, parts: list[str]) -> None:
    tensors = read_safetensors(folder / parts[2])
    name, tensor = next(iter(read_safetensors(folder / parts[0]).items()))
    write_safetensors(folder / parts[2], tensors | {name: tensor})


def _extra(folder: Path, parts: list[str]) -> None:
    tensors = read_safetensors(folder / parts[1])
    write_safetensors(folder / parts[1], tensors | {"surplus": next(iter(tensors.values()))})


def _without_first(folder: Path, parts: list[str]) -> None:
    tensors = read_safetensors(folder / parts[1])
    tensors.pop(next(iter(tensors)))
    write_safetensors(folder / parts[1], tensors)


def _index_a_pipe(folder: Path, _: list[str]) -> None:
    special(os.mkfifo, INDEX)(folder)


def _huge_header(folder: Path) -> None:
    with (folder / WEIGHTS).open("wb") as file:
        file.write(struct.pack("<Q", 200_000_000) + b"{")
        file.truncate(200_000_100)  # a hole: no byte of it may be read


FILES: dict[str, Hostile] = {
    "empty file": Hostile(bytes_edit(lambda _: b""), "truncated-file", WEIGHTS),
    "seven bytes": Hostile(bytes_edit(lambda raw: raw[:7]), "truncated-file", WEIGHTS),
    "cut in the header": Hostile(bytes_edit(lambda raw: raw[:500]), "truncated-file", WEIGHTS),
    "cut in the data": Hostile(bytes_edit(lambda raw: raw[:-3]), "truncated-file", WEIGHTS),
    "bytes left over": Hostile(bytes_edit(lambda raw: raw + b"\0" * 9), "bad-header", WEIGHTS),
    "zeros throughout": Hostile(bytes_edit(lambda raw: bytes(len(raw))), "bad-header", WEIGHTS),
    "length of 2^63": Hostile(bytes_edit(lambda raw: b"\xff" * 8 + raw[8:]), "bad-header", WEIGHTS),
    "header of 200 MB": Hostile(_huge_header, "bad-header", WEIGHTS),
    "git lfs pointer": Hostile(
        bytes_edit(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
        "bad-header", WEIGHTS),
    "html error page": Hostile(
        bytes_edit(lambda _: b"<!DOCTYPE html><html>404</html>" * 9), "bad-header", WEIGHTS),
    "pickle by that name": Hostile(bytes_edit(lambda _: b"\x80\x04\x95" + bytes(99)), "bad-header", WEIGHTS),
    "zip by that name": Hostile(bytes_edit(lambda _: b"PK\x03\x04" + bytes(99)), "bad-header", WEIGHTS),
    "gguf by that name": Hostile(bytes_edit(lambda _: b"GGUF\x03" + bytes(99)), "bad-header", WEIGHTS),
    "header no JSON": Hostile(
        bytes_edit(lambda raw: raw[:8] + raw[8:].replace(b'":', b'"=', 1)), "bad-header", WEIGHTS),
    "header not UTF-8": Hostile(
        bytes_edit(lambda raw: raw.replace(b"norm.weight", b"norm.\xffeight", 1)), "bad-header", WEIGHTS),
    "one tensor named twice": Hostile(
        bytes_edit(lambda raw: raw.replace(b"layers.0.layer_scalar", b"layers.1.layer_scalar", 1)),
        "bad-header", WEIGHTS),
    "metadata of numbers": Hostile(
        header_edit(lambda h: h.update(__metadata__={"format": 1})), "bad-header", WEIGHTS),
    "millions of values": Hostile(
        header_edit(lambda h: h.update(__metadata__={"x": "," * 1_100_000})), "bad-header", WEIGHTS),
    "no dtype": Hostile(header_edit(lambda h: h[NORM].pop("dtype")), "bad-header", NORM),
    "a key more": Hostile(of_norm(strides=[1]), "bad-header", NORM),
    "unknown dtype": Hostile(of_norm(dtype="BF17"), "dtype", NORM),
    "dtype of another size": Hostile(of_norm(dtype="F32"), "bad-header", NORM),
    "negative axis": Hostile(of_norm(shape=[-64]), "bad-header", NORM),
    "fractional axis": Hostile(of_norm(shape=[64.0]), "bad-header", NORM),
    "axes past 64 bits": Hostile(of_norm(shape=[2**62, 2**62, 64]), "bad-header", NORM),
    "forty axes": Hostile(of_norm(shape=[1] * 39 + [64]), "bad-header", NORM),
    "offsets reversed": Hostile(
        header_edit(lambda h: h[NORM]["data_offsets"].reverse()), "offset-out-of-range", NORM),
    "one offset": Hostile(of_norm(data_offsets=[0]), "offset-out-of-range", NORM),
    "offsets texts": Hostile(of_norm(data_offsets=["0", "128"]), "offset-out-of-range", NORM),
    "inside another tensor": Hostile(moved(-64), "offset-overlap", NORM),
    "far past the end": Hostile(moved(2**40), "offset-out-of-range", NORM),
    "a hole": Hostile(header_edit(lambda h: h.pop(NORM)), "bad-header", WEIGHTS),
    "escape codes in a name": Hostile(rename(NORM, "\x1b[2Jnorm"), "unsafe-name", "\x1b[2Jnorm"),
    "newline in a name": Hostile(rename(NORM, "norm\nok: 0 errors"), "unsafe-name", "norm\nok: 0 errors"),
    "empty name": Hostile(rename(NORM, ""), "unsafe-name", WEIGHTS),
    "name of a megabyte": Hostile(rename(NORM, "n" * 1_000_000), "unsafe-name", "n" * 80),
    "missing file": Hostile(
        sharded(lambda folder, parts: (folder / parts[1]).unlink()),
        "index-missing-file", "model-00002-of-00003.safetensors"),
    "index missing": Hostile(
        sharded(lambda folder, _: (folder / INDEX).unlink()), "index-missing-file", INDEX),
    "index no JSON": Hostile(
        sharded(lambda folder, _: (folder / INDEX).write_text('{"weight_map"')), "bad-header", INDEX),
    "index a list": Hostile(
        sharded(lambda folder, _: (folder / INDEX).write_text("[]")), "bad-header", INDEX),
    "index without a map": Hostile(index_edit(lambda i: i.pop("weight_map")), "bad-header", INDEX),
    "map a list": Hostile(
        index_edit(lambda i: i.update(weight_map=[*i["weight_map"]])), "bad-header", INDEX),
    "file a number": Hostile(
        index_edit(lambda i: i["weight_map"].update({NORM: 3})), "bad-header", NORM),
    "path upwards": Hostile(points_to("../outside.safetensors"), "unsafe-name", NORM),
    "absolute path": Hostile(points_to("/etc/passwd.safetensors"), "unsafe-name", NORM),
    "path into a folder": Hostile(points_to("sub/x.safetensors"), "unsafe-name", NORM),
    "path with backslash": Hostile(points_to("..\\x.safetensors"), "unsafe-name", NORM),
    "hidden file": Hostile(points_to(".x.safetensors"), "unsafe-name", NORM),
    "another ending": Hostile(points_to("model.bin"), "unsafe-name", NORM),
    "zero byte in a path": Hostile(points_to("x\0.safetensors"), "unsafe-name", NORM),
    "drive letter": Hostile(points_to("C:x.safetensors"), "unsafe-name", NORM),
    "tensor in the wrong file": Hostile(
        points_to("model-00003-of-00003.safetensors"), "index-missing-tensor", NORM),
    "tensor that no file has": Hostile(
        index_edit(lambda i: i["weight_map"].update(ghost="model-00001-of-00003.safetensors")),
        "index-missing-tensor", "ghost"),
    "tensor the index does not name": Hostile(sharded(_extra), "not-in-index", "surplus"),
    "tensor in two files": Hostile(sharded(_twice), "duplicate-tensor", TEXT4 + "embed_tokens.weight"),
    "file of another checkpoint": Hostile(
        sharded(_without_first), "index-missing-tensor", "model-00002-of-00003.safetensors"),
    "stray file": Hostile(
        lambda folder: shutil.copy(folder / WEIGHTS, folder / "old.safetensors"),
        "stray-file", "old.safetensors"),
    "link out of the folder": Hostile(link("{outside}"), "unsafe-name", WEIGHTS),
    "link by a detour": Hostile(link("../outside"), "unsafe-name", WEIGHTS),
    "link to nothing": Hostile(link("nowhere"), "index-missing-file", WEIGHTS),
    "link to itself": Hostile(link(WEIGHTS), "unsafe-name", WEIGHTS),
    "link to an endless device": Hostile(link("/dev/zero"), "unsafe-name", WEIGHTS),
    "a pipe": Hostile(special(os.mkfifo), "unsafe-name", WEIGHTS),
    "a folder": Hostile(special(Path.mkdir), "unsafe-name", WEIGHTS),
    "a socket": Hostile(special(_socket), "unsafe-name", WEIGHTS),
    "index a pipe": Hostile(sharded(_index_a_pipe), "unsafe-name", INDEX),
    "tokenizer a pipe": Hostile(special(os.mkfifo, "tokenizer.json"), "unsafe-name", "tokenizer.json"),
    "template linked outside": Hostile(
        link("{outside}", "chat_template.jinja"), "unsafe-name", "chat_template.jinja"),
}  # fmt: skip
