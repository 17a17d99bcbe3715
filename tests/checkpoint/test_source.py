from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gemma_neuron.checkpoint.source import (
    config_digest,
    open_source,
    read_config,
    read_small_files,
    write_small_files,
)
from gemma_neuron.errors import ConfigError, SourceNotFoundError, UsageError
from tests.checkpoint.helpers import clean, inspect, only


def copied_files(source: Path, destination: Path) -> list[str]:
    return write_small_files(read_small_files(open_source(str(source))), destination)


def test_folder_is_opened_as_given(gemma4: Path) -> None:
    source = open_source(str(gemma4))
    assert (source.kind, source.uri, source.revision) == ("folder", str(gemma4), "")
    assert read_config(source)["model_type"] == "gemma4"


def test_missing_folder_is_not_taken_for_a_hub_id(tmp_path: Path) -> None:
    with pytest.raises(SourceNotFoundError) as caught:
        open_source(str(tmp_path / "gone"))
    assert caught.value.exit_code == 3


def test_folder_without_config_says_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(SourceNotFoundError, match=r"found notes\.txt"):
        open_source(str(tmp_path))
    with pytest.raises(SourceNotFoundError, match="is a file"):
        open_source(str(tmp_path / "notes.txt"))


def test_names_that_no_file_system_takes(tmp_path: Path) -> None:
    for text in (str(tmp_path / ("x" * 5000)), "a\0b"):
        with pytest.raises(SourceNotFoundError):
            open_source(text)
    with pytest.raises(UsageError):
        open_source("")


def test_hub_cache_entry_instead_of_its_snapshot(tmp_path: Path) -> None:
    (tmp_path / "snapshots" / "abc").mkdir(parents=True)
    with pytest.raises(SourceNotFoundError) as caught:
        open_source(str(tmp_path))
    assert caught.value.hint.endswith("snapshots/abc")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"model_type": "gemma4",\n  oops}', "line 2, column 3"),
        (b"[1, 2]", "not an object"),
        (b'{"a": 1, "a": 2}', "stands twice"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": "\xff"}', "UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"a": ' + b"9" * 5000 + b"}", "digits"),
        (b"", "line 1, column 1"),
        (b" " * (5 * 1024 * 1024), "at most"),
    ],
)
def test_broken_config_is_refused_with_its_place(gemma4: Path, text: bytes, said: str) -> None:
    (gemma4 / "config.json").write_bytes(text)
    with pytest.raises(ConfigError, match=said) as caught:
        read_config(open_source(str(gemma4)))
    assert caught.value.exit_code == 3


def test_hub_cache_snapshot_works_in_place(gemma4: Path, tmp_path: Path) -> None:
    commit = "0123456789abcdef0123456789abcdef01234567"
    snapshot = tmp_path / "models--google--gemma" / "snapshots" / commit
    blobs = snapshot.parent.parent / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for file in gemma4.iterdir():
        shutil.copy(file, blobs / f"blob-{file.name}")
        (snapshot / file.name).symlink_to(f"../../blobs/blob-{file.name}")
    clean(inspect(snapshot))
    assert open_source(str(snapshot)).revision == commit
    linked = tmp_path / "link"
    linked.symlink_to(snapshot)
    clean(inspect(linked))
    copied = copied_files(linked, tmp_path / "copy")
    assert "chat_template.jinja" in copied
    assert not (tmp_path / "copy" / "config.json").is_symlink()


def test_link_inside_the_folder_is_fine(gemma4: Path) -> None:
    (gemma4 / "model.safetensors").rename(gemma4 / "weights.data")
    (gemma4 / "model.safetensors").symlink_to("weights.data")
    clean(inspect(gemma4))


def test_link_out_of_the_folder_is_refused(gemma4: Path, tmp_path: Path) -> None:
    (gemma4 / "model.safetensors").rename(tmp_path / "elsewhere")
    (gemma4 / "model.safetensors").symlink_to(tmp_path / "elsewhere")
    report = inspect(gemma4)
    unsafe = [f for f in report.findings if f.kind == "unsafe-name"]
    assert [f.file for f in unsafe] == ["model.safetensors"]
    assert "outside" in unsafe[0].message


def test_linked_config_and_template_outside_are_refused(gemma4: Path, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("{{ 'private' }}")
    (gemma4 / "chat_template.jinja").unlink()
    (gemma4 / "chat_template.jinja").symlink_to(secret)
    assert only(inspect(gemma4), "unsafe-name").file == "chat_template.jinja"
    (gemma4 / "config.json").unlink()
    (gemma4 / "config.json").symlink_to(secret)
    with pytest.raises(ConfigError, match="outside"):
        inspect(gemma4)


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors", "README.md"])
@pytest.mark.parametrize("special", ["pipe", "loop", "folder", "dangling"])
def test_special_files_never_block(gemma4: Path, name: str, special: str) -> None:
    (gemma4 / name).unlink(missing_ok=True)
    if special == "pipe":
        os.mkfifo(gemma4 / name)
    elif special == "loop":
        (gemma4 / name).symlink_to(name)
    elif special == "dangling":
        (gemma4 / name).symlink_to("nowhere")
    else:
        (gemma4 / name).mkdir()
    report = inspect(gemma4)
    if name == "README.md" and special == "folder":
        return clean(report)
    assert report.verdict == "broken"
    assert name in {finding.file for finding in report.findings}
    return None


def test_pipe_for_a_config_is_refused(gemma4: Path) -> None:
    (gemma4 / "config.json").unlink()
    os.mkfifo(gemma4 / "config.json")
    with pytest.raises(SourceNotFoundError):
        open_source(str(gemma4))


def test_small_files_are_copied_verbatim(gemma4: Path, tmp_path: Path) -> None:
    for name in ("LICENSE", "NOTICE.txt", "README.md", "GEMMA_TERMS.html", "validation.toml"):
        (gemma4 / name).write_text(name)
    (gemma4 / "training_args.bin").write_text("x")
    names = copied_files(gemma4, tmp_path / "out")
    assert names == sorted(
        {
            "LICENSE", "NOTICE.txt", "README.md", "GEMMA_TERMS.html", "validation.toml",
            "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
            "chat_template.jinja",
        }
    )  # fmt: skip
    for name in names:
        assert (tmp_path / "out" / name).read_bytes() == (gemma4 / name).read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == names


def test_config_digest_follows_the_bytes(gemma4: Path) -> None:
    before = config_digest(read_small_files(open_source(str(gemma4))))
    (gemma4 / "config.json").write_text((gemma4 / "config.json").read_text() + "\n")
    assert config_digest(read_small_files(open_source(str(gemma4)))) != before


def test_audit_loads_no_heavy_package(gemma4: Path) -> None:
    code = (
        "import sys; from gemma_neuron.checkpoint.audit import audit; "
        "from gemma_neuron.checkpoint.source import open_source; audit(open_source(sys.argv[1])); "
        "print([n for n in ('torch', 'transformers', 'tokenizers', 'jinja2') if n in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(gemma4)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
