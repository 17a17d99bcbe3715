"""One replica against stock transformers: its loss and gradient, for every family; its adapter fits its base."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from gemma_neuron.chat import load_chat_assets
from gemma_neuron.pipeline import merged_checkpoint
from gemma_neuron.tuning.data import read_samples, sample_file
from gemma_neuron.tuning.published import publish
from gemma_neuron.tuning.recipe import Recipe
from gemma_neuron.tuning.replica import Replica
from gemma_neuron.tuning.worker import Job
from tests.families import FAMILIES, write_family
from tests.tuning.job import write_data

# peft asks transformers by a name that is going away
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A replica has a process of its own, whose settings are its own."""
    yield
    torch.use_deterministic_algorithms(False)


def replica(base: Path, folder: Path, **more: Any) -> Replica:
    data = write_data(folder / "chats.jsonl")
    samples = folder / "samples.safetensors"
    samples.write_bytes(sample_file(read_samples(data, load_chat_assets(base), 512)))
    recipe = Recipe(steps=4, samples=5, last=8, batch=2, **more)
    return Replica(Job(model=base, samples=samples, recipe=recipe, threads=1))


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradient_are_stocks_and_the_adapter_fits_the_base(
    family: str, tmp_path: Path
) -> None:
    base = write_family(tmp_path / "base", family)
    made = replica(base, tmp_path)
    with torch.no_grad():
        made.vector.normal_(std=0.02)
    found = made.gradient(0, 0, 1)

    ids, positions, targets = made.samples.read(1, torch.device("cpu"))
    labels = torch.full_like(ids, -100)
    labels[positions + 1] = targets
    stock = made.model(input_ids=ids[None], labels=labels[None])
    expected = stock.loss * len(targets)
    assert float(found[-1]) == pytest.approx(float(expected.detach()), rel=1e-5)
    for parameter in made.parameters:
        parameter.grad = None
    expected.backward()
    wanted = torch.cat([p.grad.reshape(-1) for p in made.parameters if p.grad is not None])
    assert torch.allclose(found[:-1], wanted, rtol=1e-3, atol=1e-5 * float(wanted.abs().max()))

    made.losses = [1.0]
    files = made.state()()
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    publish(adapter, files["adapter.safetensors"], made.adapter_config(), {})
    merged = merged_checkpoint(str(base), adapter, tmp_path / "merged", lambda line: None)
    assert merged.changed == len(made.parameters) // 2


def test_a_step_that_ruins_the_adapter_says_so(tmp_path: Path) -> None:
    """The loss of a step is taken before it, and would not tell."""
    made = replica(write_family(tmp_path / "base", next(iter(FAMILIES))), tmp_path)
    total = made.gradient(0, 0, 1)
    made.apply(0, total.clone(), [1])
    assert made.is_finite()
    total[3] = float("nan")
    loss, _ = made.apply(1, total, [1])
    assert math.isfinite(loss) and not made.is_finite()


def test_a_checkpoint_gives_back_all_of_the_state(tmp_path: Path) -> None:
    base = write_family(tmp_path / "base", "31B")
    made = replica(base, tmp_path, dtype="bfloat16", dropout=0.2)
    steps = []
    for number in range(4):
        if number == 2:
            files = made.state()()
        total = made.new_total()
        for place, index in zip((0, 1), made.job.recipe.indexes(number), strict=True):
            total += made.gradient(number, place, index)
        steps.append(made.apply(number, total, made.job.recipe.indexes(number)))
    after = made.vector.detach().clone()
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    made.restore(tmp_path)
    assert made.losses == [loss for loss, _ in steps[:2]]
    for number in (2, 3):
        total = made.new_total()
        for place, index in zip((0, 1), made.job.recipe.indexes(number), strict=True):
            total += made.gradient(number, place, index)
        assert made.apply(number, total, made.job.recipe.indexes(number)) == steps[number]
    assert torch.equal(made.vector, after)
    made.restore(None)
    assert torch.equal(made.vector, made.initial) and not made.losses


def test_peft_loads_the_adapter_as_it_is(tmp_path: Path) -> None:
    from peft import PeftModel

    base = write_family(tmp_path / "base", "gemma3")
    made = replica(base, tmp_path)
    with torch.no_grad():
        made.vector.normal_(std=0.02)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    files = made.state()()
    publish(adapter, files["adapter.safetensors"], made.adapter_config(), {})
    stock = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    loaded: Any = PeftModel.from_pretrained(stock, str(adapter))
    ids = torch.arange(110, 130)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, made.model(ids).logits)


def test_the_order_of_the_data_goes_over_all_samples_each_epoch() -> None:
    recipe = Recipe(steps=4, samples=6, last=14, batch=4)
    order = [index for step in range(4) for index in recipe.indexes(step)]
    assert sorted(order[:6]) == sorted(order[6:12]) == list(range(6))
    assert order[:6] != order[6:12] and len(order) == 14
    assert [round(recipe.rate(step), 7) for step in (0, 3)] == [2e-4, 5e-5]
