"""Goldens: the reference in both config schemas, refusals, reuse, measured noise."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemma_neuron.artifacts import CommittedSet, write_json_atomic
from gemma_neuron.errors import IntegrityError, ReferenceUnavailableError
from gemma_neuron.port import Port
from gemma_neuron.validation.find import port_identity
from gemma_neuron.validation.golden import load_golden
from gemma_neuron.validation.make import make_golden
from gemma_neuron.validation.prompts import GoldenPrompts, GreedyPrompt, TeacherText
from gemma_neuron.validation.validator import Options, validate
from tests.cli_process import run_main
from tests.tiny import write_tiny_gemma4
from tests.validation.ports import make_port
from tests.validation.stock_runner import StockRunner

IDS = tuple(range(110, 170))
PROMPTS = GoldenPrompts(
    texts=(TeacherText(name="short", ids=IDS), TeacherText(name="long", ids=(2, *IDS, *IDS, *IDS))),
    greedy=(GreedyPrompt(name="q00", ids=IDS[:9], limit=4, stop_ids=()),),
    sanity=IDS,
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("source"), layers=2)


@pytest.fixture(scope="module")
def port(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Port:
    path = tmp_path_factory.mktemp("ports") / "port"
    return make_port(source, path, tp=1, dtype="bfloat16")


@pytest.fixture(scope="module")
def made(source: Path, port: Port) -> Path:
    identity = port_identity(port, PROMPTS.digest, port.record.fingerprints.template)
    return make_golden(source, PROMPTS, identity, port.golden_folder / "g.safetensors").path


def edit(made: Path, folder: Path, **changes: Any) -> Path:
    """A committed copy with other provenance."""
    folder.mkdir()
    for file in (made, made.with_suffix(".json")):
        shutil.copy(file, folder / f"g{file.suffix}")
    provenance = json.loads((folder / "g.json").read_text())
    write_json_atomic(folder / "g.json", provenance | changes)
    CommittedSet(folder, "g").commit(["g.safetensors", "g.json"])
    return folder / "g.safetensors"


def test_what_is_recorded(made: Path) -> None:
    golden = load_golden(made)
    short, long = golden.texts["short"], golden.texts["long"]
    assert short.top_ids is None and short.values.shape == (60, 512)
    assert long.top_ids is not None and long.values.shape == (181, 512)  # 512 < 1000: all of them
    assert (np.diff(long.values, axis=1) <= 0).all()
    greedy = golden.greedy["q00"]
    assert greedy.tokens.tolist() == greedy.top_ids[:, 0].tolist()
    assert greedy.margin(0, int(greedy.tokens[0])) == 0.0
    assert greedy.margin(0, int(greedy.top_ids[0, 1])) > 0
    assert golden.provenance.producer["producer"].startswith("transformers ")
    noise = golden.provenance.noise
    assert noise is not None and 1e-4 < noise.relative < 0.2 and noise.gap > 0
    assert 0 < noise.top[5] <= noise.top[50] <= noise.top[1000] <= noise.relative


@pytest.mark.fault("nxdi-12-shared-oracle")
def test_made_by_something_else_is_refused(made: Path, tmp_path: Path) -> None:
    path = edit(made, tmp_path / "x", producer={"producer": "gemma_neuron 0.1"})
    with pytest.raises(ReferenceUnavailableError, match="not by stock transformers"):
        load_golden(path)


@pytest.mark.fault("orig-17-false-pass-golden")
@pytest.mark.parametrize(
    ("field", "words"),
    [("checkpoint_digest", "another checkpoint"), ("template_sha256", "another chat template")],
)
def test_of_something_else_is_refused(
    made: Path, port: Port, tmp_path: Path, field: str, words: str
) -> None:
    identity = port_identity(port, PROMPTS.digest, port.record.fingerprints.template)
    assert load_golden(made, identity).greedy
    path = edit(made, tmp_path / "x", **{field: "0" * 64})
    with pytest.raises(IntegrityError, match=words):
        load_golden(path, identity)
    path = edit(made, tmp_path / "y", files={"model.safetensors": "0" * 64})
    with pytest.raises(IntegrityError, match="another weight files"):
        load_golden(path, identity)


def test_a_golden_for_base_scope_is_made_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`golden --base` for `validate --base` of a model that has a template: completions, not conversations."""
    source = write_tiny_gemma4(tmp_path / "source", layers=2, dtype="float32")
    questions = Path(__file__).parent / "small.toml"
    asked = ("golden", source, "--out", tmp_path / "g", "--prompts", questions, "--json")
    ended = run_main(capsys, *asked, "--base")
    assert ended.code == 0, ended.err
    golden = load_golden(tmp_path / "g")
    assert [p.text for p in golden.provenance.prompts if p.text] == ["One and"]
    port = make_port(source, tmp_path / "port", tp=1, max_context=96)
    fingerprints = port.record.fingerprints.model_copy(
        update={"checkpoint": golden.provenance.checkpoint_digest}
    )
    port.write_record(port.record.model_copy(update={"fingerprints": fingerprints}))
    found = validate(
        port,
        StockRunner(source, max_context=96),
        Options(golden=tmp_path / "g.safetensors", questions=questions, base=True),
    )
    assert found.scope == "base"
    assert [found.levels[n].status for n in (1, 3, 5)] == ["pass"] * 3, found.levels
    for left_out in (found.levels[0], found.levels[6]):
        assert left_out.status == "not-run" and "--base" in left_out.reason, left_out
    assert found.token_match["compared"] == found.token_match["equal"] > 0


def test_memory_that_holds_no_layer_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny_gemma4(tmp_path / "source", layers=2, dtype="float32")
    asked = ("golden", source, "--out", tmp_path / "g", "--host-memory", "1MB")
    ended = run_main(capsys, *asked)
    assert ended.code == 4 and "--host-memory allows 1,000,000" in ended.err, ended.err
    assert "--host-memory 2GB" in ended.err and not list(tmp_path.glob("g*"))


def test_damaged_file_is_refused(made: Path, tmp_path: Path) -> None:
    path = edit(made, tmp_path / "x")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(IntegrityError, match="another digest"):
        load_golden(path)


def test_neither_golden_nor_checkpoint(source: Path, tmp_path: Path) -> None:
    port = make_port(source, tmp_path / "port", tp=1)
    runner = StockRunner(source)
    with pytest.raises(ReferenceUnavailableError, match="no golden"):
        validate(port, runner, Options(levels=frozenset({3})))


def test_bfloat16_port_is_held_against_measured_noise(source: Path, tmp_path: Path) -> None:
    """Stock bfloat16 as the port: passes by noise measured on the same texts; its golden is reused and
    can be carried to another port by --golden."""
    questions = Path(__file__).parent / "small.toml"
    port = make_port(source, tmp_path / "port", tp=1, dtype="bfloat16", max_context=96)
    runner = StockRunner(source, dtype="bfloat16", max_context=96)
    compare = frozenset({3, 4, 5})
    first = validate(port, runner, Options(checkpoint=source, questions=questions, levels=compare))
    for item in first.levels[3:6]:
        assert item.status == "pass", item
    assert "times the noise" in first.levels[3].detail["tolerance"]["source"]
    again = validate(port, runner, Options(questions=questions, levels=compare))
    assert not first.provenance["golden"]["reused"] and again.provenance["golden"]["reused"]
    golden = next(port.golden_folder.glob("*.safetensors"))
    other = make_port(source, tmp_path / "other", tp=1, dtype="bfloat16", max_context=96)
    carried = validate(other, runner, Options(golden=golden, questions=questions, levels=compare))
    assert [item.status for item in carried.levels] == [item.status for item in first.levels]
    assert (other.golden_folder / golden.name).is_file()
    # named otherwise, it is kept under its key all the same, and the next run finds it
    named = edit(golden, tmp_path / "x")
    third = make_port(source, tmp_path / "third", tp=1, dtype="bfloat16", max_context=96)
    validate(third, runner, Options(golden=named, questions=questions, levels=compare))
    assert [path.name for path in third.golden_folder.glob("*.safetensors")] == [golden.name]
    found = validate(third, runner, Options(checkpoint=source, questions=questions, levels=compare))
    assert found.provenance["golden"]["reused"]


def test_checkpoint_of_other_weights_is_refused(source: Path, tmp_path: Path) -> None:
    other = write_tiny_gemma4(tmp_path / "other", layers=2, seed=1)
    port = make_port(source, tmp_path / "port", tp=1)
    with pytest.raises(IntegrityError, match=r"model\.safetensors has blake3"):
        validate(port, StockRunner(source), Options(checkpoint=other, levels=frozenset({2})))


def test_the_same_weights_under_another_config_are_another_model(
    source: Path, tmp_path: Path
) -> None:
    """Its reference would tell against a sound port, and stay in the port as its golden."""
    port = make_port(source, tmp_path / "port", tp=1)
    other = tmp_path / "other"
    shutil.copytree(source, other)
    config = json.loads((other / "config.json").read_text())
    (config.get("text_config") or config)["rms_norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(IntegrityError, match=r"its config\.json is not the one"):
        validate(port, StockRunner(source), Options(checkpoint=other, levels=frozenset({2})))
    assert not port.golden_folder.exists() or not list(port.golden_folder.iterdir())


def test_a_golden_of_another_vocabulary_is_not_kept(
    source: Path, made: Path, tmp_path: Path
) -> None:
    port = make_port(source, tmp_path / "port", tp=1, dtype="bfloat16")
    runner = StockRunner(source)
    runner.vocab = 8
    with pytest.raises(IntegrityError, match="the port has 8 tokens"):
        validate(port, runner, Options(golden=made, levels=frozenset({2})))
    assert not port.golden_folder.exists()


def test_another_checkpoint_is_no_fault_of_a_port_with_a_golden(
    source: Path, tmp_path: Path
) -> None:
    other = write_tiny_gemma4(tmp_path / "other", layers=2, seed=1)
    port = make_port(source, tmp_path / "port", tp=1)
    with pytest.raises(IntegrityError, match=r"model\.safetensors has blake3"):
        validate(port, StockRunner(source), Options(checkpoint=other, levels=frozenset({1})))


def test_a_full_disk_is_named_and_leaves_nothing(made: Path, tmp_path: Path) -> None:
    """As a limit on the size of files: safetensors tells the system's error in words only."""
    program = f"""
import resource, sys
from pathlib import Path
import numpy as np
from gemma_neuron.errors import EnvironmentProblem
from gemma_neuron.validation.golden import Provenance, save_golden
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
about = Provenance.model_validate_json(Path({str(made.with_suffix(".json"))!r}).read_text())
try:
    save_golden(Path({str(tmp_path / "goldens")!r}), about, {{"a": np.zeros(100_000, np.float32)}})
except EnvironmentProblem as error:
    print(error.exit_code, error.message)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("8 Writing ") and "File too large" in done.stdout
    assert not list((tmp_path / "goldens").iterdir())
