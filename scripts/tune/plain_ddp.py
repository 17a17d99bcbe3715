"""A LoRA fine-tuning as one writes it for torchrun: DistributedDataParallel over gloo, a checkpoint every few steps.

In: model folder, sample file, output folder, steps. Started again by torchrun's agent, it goes on from the checkpoint.
Each rank appends lines to `<out>/log.jsonl`: its pid at the start, rank 0 also every step.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from gemma_neuron.tuning.recipe import PROJECTIONS
from gemma_neuron.tuning.replica import Samples

BATCH, SAVE_EVERY = 6, 5


def main(model_folder: str, samples_file: str, out: Path, steps: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    note(out, {"pid": os.getpid(), "rank": rank})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=8, lora_alpha=16, target_modules=list(PROJECTIONS)))
    model.eval()
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained.values(), lr=2e-4, weight_decay=0.0)
    first = restore(out, trained, optimizer)
    samples = Samples(Path(samples_file))
    count = len(samples.offsets) - 1
    for step in range(first, steps):
        optimizer.zero_grad()
        for place in range(rank, BATCH, world):
            index = (step * BATCH + place) % count
            ids, positions, targets = samples.read(index, torch.device("cpu"))
            logits = wrapped(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[
                0
            ]
            (cross_entropy(logits, targets) * world / BATCH).backward()
        optimizer.step()
        if rank == 0:
            note(out, {"step": step + 1})
            if (step + 1) % SAVE_EVERY == 0:
                keep(out, step + 1, trained, optimizer)
    dist.destroy_process_group()


def note(out: Path, line: dict[str, Any]) -> None:
    with (out / "log.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), **line}) + "\n")


def keep(out: Path, step: int, trained: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
    tensors = {f"parameter.{name}": p.detach() for name, p in trained.items()}
    for name, parameter in trained.items():
        for key in ("exp_avg", "exp_avg_sq"):
            tensors[f"{key}.{name}"] = optimizer.state[parameter][key]
    tensors["step"] = torch.tensor(step)
    save_file(tensors, out / "checkpoint.partial")
    (out / "checkpoint.partial").replace(out / "checkpoint.safetensors")


def restore(out: Path, trained: dict[str, Any], optimizer: torch.optim.Optimizer) -> int:
    file = out / "checkpoint.safetensors"
    if not file.exists():
        return 0
    saved = load_file(file)
    step = int(saved["step"])
    for name, parameter in trained.items():
        with torch.no_grad():
            parameter.copy_(saved[f"parameter.{name}"])
        moments = {key: saved[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
