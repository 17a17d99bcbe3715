"""Drift by layer: the first layer that parts is the one that is wrong, at the first position where it shows."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemma_neuron.backends.base import Dtype
from gemma_neuron.backends.cpu.hidden import hidden_states
from gemma_neuron.errors import ReferenceUnavailableError
from gemma_neuron.port import Port
from gemma_neuron.reports import ValidationReport
from gemma_neuron.validation.text import headline, lines
from gemma_neuron.validation.validator import Options, validate
from tests.eager import eager_port
from tests.tiny import write_tiny_gemma4
from tests.validation.stock_runner import Faults, StockRunner

SMALL = Path(__file__).parent / "small.toml"
CONTEXT = 64
WINDOW = 16


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("source"), layers=4, dtype="float32")


def ported(source: Path, path: Path, dtype: Dtype = "float32") -> Port:
    shape: dict[str, Any] = {"max_context": CONTEXT, "buckets": (32,), "slots": 2}
    return eager_port(source, path / "port", tp=2, dtype=dtype, **shape)


def spoil(port: Port, name: str, value: float) -> None:
    """Every rank file again, with one tensor filled; committed as if it had been sharded so."""
    for rank in range(port.plan.tp):
        file, files = port.rank_file(rank), port.rank_set(rank)
        tensors, facts = load_file(file), files.verify().facts
        tensors[name] = torch.full_like(tensors[name], value)
        save_file(tensors, file)
        files.commit([file.name], facts)


@pytest.fixture(scope="module")
def golden(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for every port here, with the noise of bfloat16 in it."""
    port = ported(source, tmp_path_factory.mktemp("golden"), "bfloat16")
    judged(port, source, None)
    return next(port.golden_folder.glob("*.safetensors"))


def judged(
    port: Port, source: Path, golden: Path | None, faults: Faults | None = None
) -> ValidationReport:
    runner = StockRunner(source, max_context=CONTEXT, buckets=(32,), faults=faults)
    options = Options(
        checkpoint=source, golden=golden, questions=SMALL, levels=frozenset({3}), drift=True
    )
    return validate(port, runner, options, hidden=partial(hidden_states, port))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_right_port_parts_nowhere(
    source: Path, golden: Path, tmp_path: Path, dtype: Dtype
) -> None:
    report = judged(ported(source, tmp_path, dtype), source, golden)
    assert report.drift is not None and report.drift["first"] is None, report.drift
    assert len(report.drift["layers"]) == 4
    assert any(line.startswith("drift: No layer parts") for line in lines(report))


def test_a_wrong_weight_is_found_at_its_layer(source: Path, golden: Path, tmp_path: Path) -> None:
    """The story's own fault, in one layer: its `layer_scalar` is 1."""
    port = ported(source, tmp_path)
    spoil(port, "layers.2.layer_scalar", 1.0)
    report = judged(port, source, golden, Faults(layer_scalar=1.0))
    assert report.drift is not None
    assert (report.drift["first"]["layer"], report.drift["first"]["position"]) == (2, 0)
    assert report.verdict == "differs" and "layer 2" in headline(report)
    assert "position 0, token '<bos>'" in headline(report)


def test_a_window_that_forgets_is_found_where_it_ends(
    source: Path, golden: Path, tmp_path: Path
) -> None:
    port = ported(source, tmp_path)
    config = port.source_folder / "config.json"
    found = json.loads(config.read_text())
    found.get("text_config", found)["sliding_window"] = WINDOW - 1
    config.write_text(json.dumps(found))
    report = judged(Port(port.path), source, golden, Faults(window=-1))
    assert report.drift is not None
    first = report.drift["first"]
    assert (first["layer"], first["kind"], first["position"]) == (0, "sliding", WINDOW - 1)


def test_without_the_checkpoint_nothing_is_begun(source: Path, tmp_path: Path) -> None:
    runner = StockRunner(source, max_context=CONTEXT, buckets=(32,))
    with pytest.raises(ReferenceUnavailableError, match="--drift"):
        validate(ported(source, tmp_path), runner, Options(drift=True))
    assert runner.calls == 0
