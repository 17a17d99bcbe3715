"""A user's mistakes: the right exit code, one clear message with a hint, nothing half-written."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import run
from tests.tiny import gemma4_config, write_json, write_tiny_gemma4


def refused(code: int, *arguments: object) -> str:
    """The message of a refusal; never a traceback, always a hint line."""
    found = run(*arguments)
    assert found.returncode == code, (found.returncode, found.stdout, found.stderr)
    assert "Traceback" not in found.stderr
    assert found.stderr.count("error: ") == 1
    assert "hint: " in found.stderr
    return found.stderr


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_gemma4(tmp_path / "source")


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "port"


def compiled(source: Path, out: Path, *more: object) -> tuple[object, ...]:
    return ("compile", source, "--out", out, "--tp", 2, "--backend", "cpu", *more)


def test_no_config(source: Path, out: Path) -> None:
    (source / "config.json").unlink()
    assert "config.json" in refused(3, *compiled(source, out))
    assert not out.exists()


def test_config_that_is_no_json(source: Path, out: Path) -> None:
    (source / "config.json").write_text('{"model_type": ')
    assert "config.json" in refused(3, *compiled(source, out))
    assert not out.exists()


def test_unknown_model_type_suggests_the_nearest(source: Path, out: Path) -> None:
    write_json(source / "config.json", gemma4_config() | {"model_type": "gema4"})
    message = refused(3, *compiled(source, out))
    assert "'gema4'" in message and "'gemma4'" in message
    assert not out.exists()


def test_half_a_safetensors_file(source: Path, out: Path) -> None:
    file = source / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert "truncated-file" in refused(3, *compiled(source, out))
    assert not out.exists()


def test_load_10_a_shard_named_in_the_index_is_missing(source: Path, out: Path) -> None:
    """load-10-missing-shard-random."""
    from tests.tiny import read_safetensors, write_sharded

    parts = write_sharded(source, read_safetensors(source / "model.safetensors"))
    (source / "model.safetensors").unlink()
    (source / parts[1]).unlink()
    assert parts[1] in refused(3, *compiled(source, out))
    assert not out.exists()


def test_no_tokenizer(source: Path, out: Path) -> None:
    (source / "tokenizer.json").unlink()
    assert "tokenizer" in refused(3, *compiled(source, out))
    assert not out.exists()


def test_no_template_is_an_error_but_for_base(source: Path, out: Path) -> None:
    (source / "chat_template.jinja").unlink()
    assert "--base" in refused(3, *compiled(source, out))
    assert not out.exists()
    assert run("shard", source, "--out", out, "--tp", 2, "--base").returncode == 0


@pytest.mark.parametrize("tp", [0, 3, 7, -1])
def test_a_tp_that_cannot_be(source: Path, out: Path, tp: int) -> None:
    message = refused(4, "compile", source, "--out", out, "--tp", tp, "--backend", "cpu")
    assert f"tp {tp}" in message or f"tp is {tp}" in message
    assert not out.exists()


def test_a_context_longer_than_the_models(source: Path, out: Path) -> None:
    message = refused(4, *compiled(source, out, "--max-context", "999k"))
    assert str(999 * 1024) in message
    assert not out.exists()


def test_out_that_holds_another_port(source: Path, out: Path, tmp_path: Path) -> None:
    assert run("shard", source, "--out", out, "--tp", 2).returncode == 0
    before = sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*"))
    other = write_tiny_gemma4(tmp_path / "other", seed=9)
    assert "another port" in refused(2, "shard", other, "--out", out, "--tp", 2)
    assert "plan" in refused(2, "shard", source, "--out", out, "--tp", 4)
    assert sorted((p, p.stat().st_mtime_ns) for p in out.rglob("*")) == before


def test_out_that_is_a_link_to_nothing(source: Path, out: Path, tmp_path: Path) -> None:
    out.symlink_to(tmp_path / "gone")
    message = refused(2, "shard", source, "--out", out, "--tp", 2)
    assert f"it is a link to {tmp_path / 'gone'}" in message


def test_a_long_argument_does_not_bury_the_message() -> None:
    message = refused(3, "plan", "x" * 100_000)
    assert "(100,000 characters)" in message and len(message) < 1000


def test_out_that_is_no_port(source: Path, out: Path) -> None:
    out.mkdir()
    (out / "thesis.txt").write_text("mine")
    refused(2, *compiled(source, out))
    assert [p.name for p in out.iterdir()] == ["thesis.txt"]


def test_a_float16_port_is_refused(source: Path, out: Path) -> None:
    """attn-13-fp16-nan: Gemma's activations leave float16's range."""
    assert "bfloat16" in refused(2, *compiled(source, out, "--dtype", "float16"))


@pytest.mark.parametrize(
    "more",
    [
        ("--buckets", "1"),
        ("--buckets", "4096"),
        ("--buckets", "many"),
        ("--slots", "0"),
        ("--strategy", "guess"),
        ("--backend", "gpu"),
        ("--max-context", "1"),
        ("--frobnicate",),
    ],
)
def test_flags_that_cannot_be(source: Path, out: Path, more: tuple[str, ...]) -> None:
    refused(2, *compiled(source, out, "--max-context", "64", *more))
    assert not out.exists()


def test_neuron_back_end_says_it_is_not_here(source: Path, out: Path) -> None:
    refused(8, "compile", source, "--out", out, "--backend", "neuron")


def test_no_compiler_is_said_before_anything_starts(source: Path, out: Path) -> None:
    python = Path(sys.executable)
    command = [str(python), "-m", "gemma_neuron", *map(str, compiled(source, out))]
    environment = {"PATH": "/nonexistent", "HOME": str(out.parent)}
    found = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert found.returncode == 8, found.stderr
    assert "apt-get install g++" in found.stderr
    assert not out.exists()


def test_not_a_port(tmp_path: Path) -> None:
    for command in ("validate", "serve-local", "chat"):
        assert "port.json" in refused(5, command, tmp_path)


def test_json_errors_are_one_document(source: Path, out: Path) -> None:
    (source / "config.json").unlink()
    found = run(*compiled(source, out, "--json"))
    document = json.loads(found.stdout)
    assert document["schema"] == 1
    assert document["error"]["exit_code"] == found.returncode == 3
    assert document["error"]["type"] == "SourceNotFoundError"
    assert document["error"]["message"] and document["error"]["hint"]


def test_json_usage_error(tmp_path: Path) -> None:
    found = run("plan", "--json", "--nonsense")
    assert found.returncode == 2
    assert json.loads(found.stdout)["error"]["exit_code"] == 2


def test_control_bytes_of_a_name_are_escaped(source: Path, out: Path) -> None:
    write_json(source / "config.json", gemma4_config() | {"model_type": "gem\x1b[2Jma"})
    assert "\x1b" not in refused(3, *compiled(source, out))


def test_inspect_json_of_a_broken_checkpoint(source: Path) -> None:
    shutil.copy(source / "model.safetensors", source / "stray.safetensors")
    found = run("inspect", source, "--json")
    document = json.loads(found.stdout)
    assert found.returncode == 3
    assert document["verdict"] == "broken"
    kinds = {finding["kind"] for finding in document["findings"]}
    assert kinds & {"stray-file", "duplicate-tensor"}


def test_level_seven_without_tasks_is_not_passed_over(tmp_path: Path) -> None:
    assert "--tasks" in refused(2, "validate", tmp_path, "--levels", "0-7")
