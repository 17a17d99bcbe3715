"""`merge` against peft's own adapters: what it changes, what it leaves, what it refuses."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from gemma_neuron.errors import DiskFullError, GemmaNeuronError, UsageError
from gemma_neuron.pipeline import merged_checkpoint
from gemma_neuron.tuning.adapter import AdapterError
from tests.tiny import decode, read_safetensors, write_sharded, write_tiny_gemma3, write_tiny_gemma4

# peft asks transformers by a name that is going away, and warns of what the tests do on purpose
pytestmark = [
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:peft.*"),
]
PROJECTIONS = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gemma4(tmp_path_factory.mktemp("base"), layers=6)


def stock(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def write_adapter(base: Path, out: Path, **options: Any) -> tuple[Path, Any]:
    """An adapter whose factors are not zero, and the peft model it is of."""
    torch.manual_seed(7)
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 6, "target_modules": PROJECTIONS} | options
    model = get_peft_model(stock(base), LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.05)
    model.save_pretrained(str(out))
    return out, model


def all_tensors(folder: Path) -> dict[str, Any]:
    return {
        name: tensor
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in read_safetensors(file).items()
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 2}},
        {"alpha_pattern": {r"layers\.[13]\.self_attn\.q_proj": 11, "k_proj": 3}, "r": 3},
        {
            "use_rslora": True,
            "rank_pattern": {"^.*layers.1.mlp.down_proj": 5, "down_proj": 2},
            "alpha_pattern": {"(q|k)_proj": 9},
            "init_lora_weights": "gaussian",
        },
    ],
)
def test_merge_equals_pefts_sum_rounded_once(
    base: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    adapter, model = write_adapter(base, tmp_path / "adapter", **options)
    merged = merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    expected = model.merge_and_unload().state_dict()
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    changed = {name for name in before if before[name] != after[name]}
    assert len(changed) == merged.changed == 6 * len(PROJECTIONS)
    assert merged.changed + merged.copied == len(before)
    for name in changed:
        wanted = expected[name].to(torch.bfloat16).to(torch.float32).numpy()
        differ = decode(after[name]) != wanted
        # float32 sums in another order may fall on the other side of a rounding boundary
        assert differ.mean() < 1e-3, name
        assert np.allclose(decode(after[name]), wanted, rtol=2**-7, atol=1e-6)


def test_everything_else_is_byte_for_byte_as_it_was(base: Path, tmp_path: Path) -> None:
    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    before, after = all_tensors(base), all_tensors(tmp_path / "out")
    assert {n for n in before if before[n] != after[n]} == {
        f"model.language_model.layers.{i}.self_attn.q_proj.weight" for i in range(6)
    }
    assert [n for n in before if n.endswith("layer_scalar")]
    for path in base.iterdir():
        if path.suffix != ".safetensors":
            assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()


def test_a_checkpoint_of_several_files_and_of_gemma_3(tmp_path: Path) -> None:
    base = write_tiny_gemma3(tmp_path / "base")
    tensors = all_tensors(base)
    adapter, _ = write_adapter(base, tmp_path / "adapter")
    (base / "model.safetensors").unlink()
    write_sharded(base, tensors)
    merged = merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    assert merged.changed == 7 * len(PROJECTIONS)
    after = all_tensors(tmp_path / "out")
    assert sum(tensors[name] != after[name] for name in tensors) == merged.changed


def edited(adapter: Path, **fields: Any) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_what_is_no_plain_lora_is_refused_by_name(base: Path, tmp_path: Path) -> None:
    adapter, _ = write_adapter(base, tmp_path / "adapter", use_dora=True)
    with pytest.raises(AdapterError, match="use_dora"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    edited(adapter, use_dora=False)
    with pytest.raises(AdapterError, match="magnitude"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    plain, _ = write_adapter(base, tmp_path / "plain")
    whole = (plain / "adapter_config.json").read_text()
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"peft_type": "IA3"}, "peft_type"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias all"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"lora_bias": True}, "lora_bias"),
        ({"r": 0}, "r:"),
        ({"r": 16}, r"has rank 4; adapter_config\.json says 16"),
        ({"rank_pattern": {"k_proj": 2}}, "has rank 4; .* says 2"),
        ({"lora_alpha": float("inf")}, "lora_alpha: Input should be a finite"),
        ({"lora_alpha": 1e308}, "makes values that BF16 does not hold"),
        ({"alpha_pattern": {"q_proj": float("nan")}}, "finite number"),
        ({"alpha_pattern": {"(": 3}}, "is no regular expression"),
        ({"alpha_pattern": {"(.+)+y": 3}}, "repeats too much"),
        *[
            ({"init_lora_weights": kind}, f"init_lora_weights {kind}")
            for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga", "mica")
        ],
        *[
            ({name: value}, name)
            for name, value in (
                ("alora_invocation_tokens", [1]),
                ("use_qalora", True),
                ("use_bdlora", {"nblocks": 2}),
                ("arrow_config", {"top_k": 1}),
                ("layer_replication", [[0, 2], [1, 3]]),
                ("target_parameters", ["experts.down_proj"]),
                ("trainable_token_indices", [3]),
                ("use_a_method_of_next_year", True),
            )
        ],
    )
    for fields, named in refused:
        edited(plain, **fields)
        with pytest.raises(AdapterError, match=named):
            merged_checkpoint(str(base), plain, tmp_path / "out", lambda line: None)
        (plain / "adapter_config.json").write_text(whole)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "plain"]


def test_weights_that_are_no_factors_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    path = adapter / "adapter_model.safetensors"
    whole = load_file(path)
    a = next(name for name in whole if "lora_A" in name)
    b = a.replace("lora_A", "lora_B")
    for change, named in (
        ({a: torch.full_like(whole[a], float("nan"))}, "lora_A.* has values that are NaN or inf"),
        ({b: torch.full_like(whole[b], float("inf"))}, "lora_B.* has values that are NaN or inf"),
        ({a: whole[a].to(torch.int8)}, r"is torch\.int8"),
        ({a: whole[a][:0], b: whole[b][:, :0]}, "has rank 0"),
        ({a.replace(".weight", ".other.weight"): whole[a].clone()}, "two adapters in one"),
    ):
        save_file({name: tensor.contiguous() for name, tensor in (whole | change).items()}, path)
        with pytest.raises(AdapterError, match=named):
            merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    path.rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"adapter_model\.bin, a pickle"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)


def test_a_full_disk_leaves_nothing_of_it(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    monkeypatch.setattr("gemma_neuron.tuning.merge.os.pwrite", full)
    with pytest.raises(DiskFullError, match="No space left"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_an_out_folder_that_would_change_something_else_is_refused(
    base: Path, tmp_path: Path
) -> None:
    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for out, named in (
        (base, "is there already"),
        (base / "merged", "inside the source"),
        (tmp_path / "link", "is there already"),
    ):
        with pytest.raises(UsageError, match=named):
            merged_checkpoint(str(base), adapter, out, lambda line: None)
    assert not (base / "merged").exists()


def test_the_tied_table_is_refused(base: Path, tmp_path: Path) -> None:
    """load-22-lora-on-tied"""
    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["lm_head", "q_proj"])
    with pytest.raises(AdapterError, match=r"lm_head.*ties its table to the head"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)


def test_a_v_projection_that_a_layer_lacks_is_refused(base: Path, tmp_path: Path) -> None:
    wide = write_tiny_gemma4(tmp_path / "wide", layers=6, attention_k_eq_v=False)
    adapter, _ = write_adapter(wide, tmp_path / "adapter", target_modules=["v_proj"])
    with pytest.raises(AdapterError, match=r"layers\.5\.self_attn\.v_proj.*V is its K"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)


def test_an_adapter_of_another_model_names_shape_or_tensor(base: Path, tmp_path: Path) -> None:
    other = write_tiny_gemma4(tmp_path / "other", layers=7, hidden_size=32)
    adapter, _ = write_adapter(other, tmp_path / "adapter", target_modules=["q_proj"])
    with pytest.raises(AdapterError, match=r"is \[128, 32\]; the checkpoint's is \[128, 64\]"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)


def test_an_out_folder_in_use_and_a_folder_that_is_no_adapter(base: Path, tmp_path: Path) -> None:
    adapter, _ = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"])
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match="is there already"):
        merged_checkpoint(str(base), adapter, tmp_path / "out", lambda line: None)
    with pytest.raises(GemmaNeuronError, match="is no adapter"):
        merged_checkpoint(str(base), tmp_path / "out", tmp_path / "new", lambda line: None)
    shutil.copy(base / "config.json", adapter / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors"):
        merged_checkpoint(str(base), adapter, tmp_path / "new", lambda line: None)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["notes.txt"]
