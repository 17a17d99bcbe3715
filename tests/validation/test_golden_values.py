"""Goldens whose digests agree and whose values no reference can have said."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from gemma_neuron.artifacts import CommittedSet, write_json_atomic
from gemma_neuron.errors import CheckpointError, IntegrityError
from gemma_neuron.places import require_place
from gemma_neuron.validation.golden import GoldenIdentity, Provenance, load_golden
from gemma_neuron.validation.golden_noise import Noise
from gemma_neuron.validation.golden_tensors import GoldenText
from gemma_neuron.validation.levels import position
from gemma_neuron.validation.levels.logits import _largest
from gemma_neuron.validation.make import _require_judgeable, mean_loss, teach
from gemma_neuron.validation.prompts import TeacherText
from tests.cli_process import run_main
from tests.tiny import write_tiny_gemma4

Tensors = dict[str, NDArray[Any]]
FACTS: dict[str, Any] = {
    "format": 3,
    "key": "k",
    "producer": {"producer": "transformers 5", "dtype": "float32"},
    "checkpoint_digest": "c",
    "template_sha256": "t",
    "files": {},
    "prompts_digest": "p",
    "prompts": [],
    "seed": 1,
    "sanity_loss": 1.0,
    "shuffled_loss": 2.0,
    "sanity_tokens": 9,
}
NOISE: dict[str, Any] = {
    "dtype": "bfloat16",
    "relative": 0.1,
    "top": {"5": 0.1, "50": 0.1, "1000": 0.1},
    "kl": 0.1,
    "pearson": 0.99,
    "gap": 0.1,
}


def tensors() -> Tensors:
    ids, row = np.arange(3, dtype=np.int32), np.ones(3, np.float32)
    top = np.zeros((3, 4), np.int32), np.ones((3, 4), np.float32)
    return {
        "text.short.ids": ids,
        "text.short.logsumexp": row,
        "text.short.target_logprob": row,
        "text.short.logits": np.ones((3, 8), np.float32),
        "text.long.ids": ids,
        "text.long.logsumexp": row,
        "text.long.target_logprob": row,
        "text.long.top_ids": top[0],
        "text.long.top_values": top[1],
        "greedy.q00/after.tool.prompt": np.arange(5, dtype=np.int32),
        "greedy.q00/after.tool.tokens": ids,
        "greedy.q00/after.tool.top_ids": top[0],
        "greedy.q00/after.tool.top_values": top[1],
    }


def committed(folder: Path, found: Tensors, **changes: Any) -> Path:
    """A golden of these tensors whose marker vouches for it."""
    save_file(found, folder / "g.safetensors")
    write_json_atomic(folder / "g.json", FACTS | changes)
    CommittedSet(folder, "g").commit(["g.safetensors", "g.json"])
    return folder / "g.safetensors"


def test_a_whole_one_is_read(tmp_path: Path) -> None:
    golden = load_golden(committed(tmp_path, tensors(), noise=NOISE))
    assert set(golden.texts) == {"short", "long"} and set(golden.greedy) == {"q00/after.tool"}
    golden.require_vocabulary(8)
    for other in (4, 9):  # of token 4, and of rows of 8
        with pytest.raises(IntegrityError, match=r"ids up to 4 and rows of \[8\] logits"):
            golden.require_vocabulary(other)


def filled(value: float) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda tensor: np.full_like(tensor, value)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("text.short.logits", filled(np.nan), "no numbers"),
        ("text.short.logits", filled(np.inf), "no numbers"),
        ("text.long.top_values", filled(np.nan), "no numbers"),
        ("text.long.logsumexp", filled(np.nan), "no numbers"),
        ("text.short.target_logprob", filled(-np.inf), "no numbers"),
        ("text.short.ids", filled(-1), "negative"),
        ("text.short.ids", lambda t: t.astype(np.float32), r"ids is float32 \[3\]"),
        ("text.short.logits", lambda t: t.astype(np.float64), "logits is float64"),
        ("text.short.logits", lambda t: t[:2].copy(), "has 2 rows, not 3"),
        ("text.short.logits", lambda t: t.reshape(-1), r"logits is float32 \[24\]"),
        ("text.short.ids", lambda t: t[:0].copy(), r"ids is int32 \[0\]"),
        ("text.short.ids", lambda t: np.array(t[0]), r"ids is int32 \[\]"),
        ("text.long.top_ids", lambda t: t[:, :2].copy(), "different shapes"),
        ("text.long.top_ids", None, "has the parts"),
        ("text.short.ids", None, "has the parts"),
        ("greedy.q00/after.tool.prompt", None, "has the parts"),
        ("greedy.q00/after.tool.top_values", lambda t: t[:1].copy(), "has 1 rows, not 3"),
        ("x", lambda _: np.ones(1), "'x' is no tensor of a golden"),
        ("other.q.ids", lambda _: np.ones(1), "is no tensor of a golden"),
    ],
)
def test_wrong_tensors_are_refused(
    tmp_path: Path, name: str, change: Callable[[Any], Any] | None, words: str
) -> None:
    found = tensors()
    old = found.pop(name, None)
    if change is not None:
        found[name] = change(old)
    with pytest.raises(IntegrityError, match=words) as caught:
        load_golden(committed(tmp_path, found))
    assert caught.value.hint == "Make the golden again."


@pytest.mark.parametrize(
    "changes",
    [
        {"sanity_loss": float("nan")},
        {"shuffled_loss": float("inf")},
        {"noise": NOISE | {"relative": float("nan")}},
        {"noise": NOISE | {"gap": float("inf")}},
        {"noise": NOISE | {"gap": -0.1}},
        {"noise": NOISE | {"pearson": 1.1}},
        {"noise": NOISE | {"top": {"5": 0.1, "50": 0.1}}},
        {"noise": NOISE | {"top": {**NOISE["top"], "50": -0.1}}},
        {"sanity_loss": -1.0},
        {"format": 2},
        {"producer": ["transformers 5"]},
    ],
)
def test_wrong_provenance_is_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError, match="not a golden's provenance of format 3"):
        load_golden(committed(tmp_path, tensors(), **changes))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"relative": 0.21}, "0.21 of the largest logit \\(limit 0.2\\)"),
        ({"relative": 1e30}, "1e\\+30 of the largest logit"),
        ({"top": {**NOISE["top"], "5": 0.3}}, "0.3 of the largest logit among the likeliest"),
        ({"kl": 50}, "50 nats of KL"),
        ({"gap": 0.5}, "0.5 of the largest logit in the lead"),
        ({"pearson": 0.5}, "a Pearson correlation of 0.5"),
    ],
)
def test_noise_that_no_model_has_is_refused(
    tmp_path: Path, change: dict[str, Any], words: str
) -> None:
    """It widens the bars of levels 3 to 5: with more of it, any port passes."""
    path = committed(tmp_path, tensors(), noise=NOISE | change)
    with pytest.raises(IntegrityError, match=words) as caught:
        load_golden(path)
    assert str(path) in caught.value.message and caught.value.exit_code == 5


def test_experts_are_allowed_more_noise(tmp_path: Path) -> None:
    """A rounding that turns a router's choice is no fault of a port; even so there is a limit."""
    facts = GoldenIdentity(
        checkpoint_digest="c", template_sha256="t", prompts_digest="p", dtype="float32",
        noise_dtype="bfloat16", files={}, experts=True,
    )  # fmt: skip
    noise = NOISE | {"relative": 0.5, "pearson": 0.7}
    assert load_golden(committed(tmp_path, tensors(), noise=noise), facts).provenance.noise
    with pytest.raises(IntegrityError, match=r"is 0\.5 of the largest logit"):
        load_golden(tmp_path / "g", replace(facts, experts=False))
    with pytest.raises(IntegrityError, match=r"is 1\.1 of the largest logit \(limit 1\)"):
        load_golden(committed(tmp_path, tensors(), noise=noise | {"relative": 1.1}), facts)


def test_a_checkpoint_that_bfloat16_cannot_hold_makes_no_golden() -> None:
    row = np.ones(1, np.float32)
    text = GoldenText("a", np.ones(1, np.int32), np.ones((1, 8), np.float32), None, row, row)
    _require_judgeable(Noise.model_validate(NOISE), {"a": text}, experts=False)
    _require_judgeable(None, {"a": text}, experts=False)
    with pytest.raises(CheckpointError, match="no bfloat16 port of this") as caught:
        _require_judgeable(Noise.model_validate(NOISE | {"kl": 9}), {"a": text}, experts=False)
    assert "--dtype float32" in caught.value.hint


def test_what_is_no_safetensors_file_is_refused(tmp_path: Path) -> None:
    path = committed(tmp_path, tensors())
    path.write_bytes(b"hello")
    CommittedSet(tmp_path, "g").commit(["g.safetensors", "g.json"])
    with pytest.raises(IntegrityError, match="cannot be read as safetensors"):
        load_golden(path)


def test_a_reference_that_gives_no_numbers_makes_no_golden() -> None:
    rows = np.ones((3, 8), np.float32)
    rows[1, 2] = np.nan
    with pytest.raises(CheckpointError, match=r"no numbers .* on 'a', positions from 0 on"):
        teach(iter([(0, rows)]), TeacherText(name="a", ids=(1, 2, 3)))
    with pytest.raises(CheckpointError, match="on the sanity text"):
        mean_loss(iter([(0, rows)]), (1, 2, 3))
    assert Provenance.model_validate(FACTS).noise is None


def test_a_port_s_log_sum_exp_that_is_no_number_is_far_off() -> None:
    assert _largest(np.array([0.5, -1.5], np.float32)) == 1.5
    assert _largest(np.array([0.5, np.nan], np.float32)) > 1e29


def test_a_golden_that_ends_before_the_longest_bucket_covers_too_little() -> None:
    def asked(reach: int, bucket: int, context: int) -> str | None:
        from types import SimpleNamespace as Some

        geometry = Some(window=32, layers=[Some(kind="sliding")])
        runner = Some(prefill_buckets=(64, bucket), max_context=context)
        return position.not_covered(
            cast(Any, Some(port=Some(geometry=geometry), runner=runner)), reach
        )

    assert asked(560, 512, 1024) is None
    assert asked(560, 560, 560) is None  # the bucket is the whole context: it has no far edge
    found = asked(560, 1024, 4096)
    assert found is not None and "(560 tokens) ends before the edge of the longest bucket" in found


def test_one_without_its_marker_is_not_whole(tmp_path: Path) -> None:
    path = committed(tmp_path, tensors())
    (tmp_path / "g.committed").unlink()
    with pytest.raises(IntegrityError, match=r"g\.committed is missing") as caught:
        load_golden(path)
    assert "four files: copy all of g.*" in caught.value.hint


def test_where_a_golden_cannot_lie_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_tiny_gemma4(tmp_path / "source", layers=2)
    (tmp_path / "file").write_text("x")
    (tmp_path / "g.safetensors").mkdir()
    for out in (tmp_path / "file" / "g", tmp_path / "g.safetensors", Path("/proc/no/g")):
        ended = run_main(capsys, "golden", source, "--out", out)
        assert (
            ended.code == 2 and "cannot be written" in ended.err and "reference:" not in ended.err
        )
    require_place(tmp_path / "new", "--out")
    assert not (tmp_path / "new").exists()
