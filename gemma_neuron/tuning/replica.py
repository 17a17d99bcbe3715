"""One data-parallel replica: stock transformers' model with peft's LoRA, gradients one sample at a time.

All of an adapter's parameters are views of one float32 vector, in the order in which the model has them: a sample's
gradient is a vector, a step's the sum of its samples' in the order of the data, whoever computed them. So the result
does not depend on the number of replicas. Gradients are exchanged whole (all_gather), never summed on the way:
a sum over ranks would depend on how many there are.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import peft
import torch
import torch.distributed as dist
import transformers
from blake3 import blake3
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.numpy import load as load_arrays
from safetensors.torch import load, load_file, save
from torch import Tensor
from torch.nn import functional

from gemma_neuron.tuning.checkpoints import ADAPTER_FILE, STATE_FILE, TRAINING_FILE

if TYPE_CHECKING:
    from gemma_neuron.tuning.worker import Job

LAYERS = r"model\.(?:language_model\.)?layers\.\d+\.(?:self_attn|mlp)\."
"""Module path of a decoder layer's linear layers in stock's text and multimodal classes; no other tower's."""
EXTRA = 1
"""Elements after the gradient in an exchanged vector: the sample's summed loss."""


class Replica:
    """Model, adapter, optimiser. `vector`: float32 [parameters], which the adapter's tensors are views of."""

    def __init__(self, job: Job) -> None:
        self.job = job
        torch.set_num_threads(job.threads)
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=job.device != "cpu")
        self.device = torch.device(job.device)
        self.samples = Samples(job.samples)
        self.model = _adapted(job)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.vector = _flattened(self.parameters)
        self.initial = self.vector.detach().clone()
        self.losses: list[float] = []
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> torch.optim.AdamW:
        recipe = self.job.recipe
        return torch.optim.AdamW(
            [self.vector],
            lr=recipe.learning_rate,
            weight_decay=recipe.weight_decay,
            foreach=False,
            fused=False,
        )

    def facts(self) -> dict[str, Any]:
        return {
            "parameters": self.vector.numel(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "peft": peft.__version__,
        }

    def new_total(self) -> Tensor:
        """Zeros for a gradient and its loss: float32 [parameters + 1]."""
        return torch.zeros(self.vector.numel() + EXTRA, device=self.device)

    def gradient(self, step: int, place: int, index: int) -> Tensor:
        """Gradient of sample `index`'s summed loss, and that loss behind it: float32 [parameters + 1]."""
        ids, positions, targets = self.samples.read(index, self.device)
        self._seed(step, place)
        logits = self.model(input_ids=ids[None], use_cache=False, logits_to_keep=positions).logits[
            0
        ]
        loss = functional.cross_entropy(logits.float(), targets, reduction="sum")
        gradients = torch.autograd.grad(loss, self.parameters)
        pieces = [g.reshape(-1).to(torch.float32) for g in gradients]
        return torch.cat([*pieces, loss.detach().reshape(1).to(torch.float32)])

    def _seed(self, step: int, place: int) -> None:
        """Dropout draws from a seed of the sample's own, so that it does not matter who computes it."""
        if self.job.recipe.dropout:
            text = f"{self.job.recipe.seed}-{step}-{place}"
            torch.manual_seed(int.from_bytes(blake3(text.encode()).digest(7), "little"))

    def gather(self, vector: Tensor, world: int) -> list[Tensor]:
        """Every rank's vector, by rank. Raises RuntimeError when one of them is gone."""
        if world == 1:
            return [vector]
        mine = vector.cpu()
        parts = [torch.empty_like(mine) for _ in range(world)]
        dist.all_gather(parts, mine)
        return [part.to(self.device) for part in parts]

    def apply(self, step: int, total: Tensor, indexes: list[int]) -> tuple[float, int]:
        """Take the optimiser's step with the summed gradients; mean loss and learned tokens."""
        recipe = self.job.recipe
        tokens = sum(self.samples.targets(index) for index in indexes)
        total /= tokens
        gradient, loss = total[:-EXTRA], float(total[-1])
        norm = float(torch.linalg.vector_norm(gradient))
        if norm > recipe.clip:
            gradient *= recipe.clip / norm
        self.vector.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = recipe.rate(step)
        self.optimizer.step()
        self.vector.grad = None
        self.losses.append(loss)
        return loss, tokens

    def state(self) -> Callable[[], dict[str, bytes]]:
        """The state of now, copied; called, its files. Step and position follow from the number of losses."""
        adapter = {
            name: tensor.detach().cpu().clone().contiguous()
            for name, tensor in get_peft_model_state_dict(self.model).items()
        }
        moments = self.optimizer.state.get(self.vector, {})
        training = {
            name: moments.get(name, torch.zeros_like(self.vector)).detach().cpu().clone()
            for name in ("exp_avg", "exp_avg_sq")
        }
        training["losses"] = torch.tensor(self.losses, dtype=torch.float32)
        return lambda: self._files(adapter, training)

    def _files(self, adapter: dict[str, Tensor], training: dict[str, Tensor]) -> dict[str, bytes]:
        recipe, steps = self.job.recipe, len(training["losses"])
        record = {
            "step": steps,
            "position": recipe.places(steps).start,
            "epoch": recipe.places(steps).start // recipe.samples,
            "optimizer": {"name": "AdamW", "step": steps},
            "scheduler": {"learning_rate": recipe.rate(steps)},
            # A draw depends on seed, step and place of a sample alone; there is no other state.
            "random": {"seed": recipe.seed, "step": steps},
        }
        return {
            ADAPTER_FILE: save(adapter, metadata={"format": "pt"}),
            TRAINING_FILE: save(training, metadata={"format": "pt"}),
            STATE_FILE: (json.dumps(record, indent=1) + "\n").encode(),
        }

    def restore(self, checkpoint: Path | Mapping[str, bytes] | None) -> None:
        """Take up a verified checkpoint, from its folder or its files, or the beginning."""
        self.optimizer = self._new_optimizer()
        if checkpoint is None:
            self.losses = []
            with torch.no_grad():
                self.vector.copy_(self.initial)
            return
        training = _tensors(checkpoint, TRAINING_FILE)
        self.losses = training["losses"].tolist()
        saved = _tensors(checkpoint, ADAPTER_FILE)
        with torch.no_grad():
            for name, tensor in get_peft_model_state_dict(self.model).items():
                tensor.copy_(saved[name])
        self.optimizer.state[self.vector] = {
            "step": torch.tensor(float(len(self.losses))),
            "exp_avg": training["exp_avg"].to(self.device),
            "exp_avg_sq": training["exp_avg_sq"].to(self.device),
        }

    def is_finite(self) -> bool:
        return bool(torch.isfinite(self.vector).all())

    def digest(self) -> str:
        """blake3 of the adapter's parameters."""
        return blake3(self.vector.detach().cpu().numpy().tobytes()).hexdigest()

    def base_digest(self) -> str:
        """blake3 of the base's tensors as they were loaded, names, dtypes and shapes with them."""
        digest = blake3(max_threads=blake3.AUTO)
        for name, tensor in self.model.state_dict().items():
            if "lora_" not in name:
                digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}".encode())
                digest.update(tensor.reshape(-1).cpu().view(torch.uint8).numpy().data)
        return digest.hexdigest()

    def adapter_config(self) -> dict[str, Any]:
        """peft's record as plain JSON values: its enumerations would bring peft into the controller."""
        found = self.model.peft_config["default"].to_dict()
        plain = {key: sorted(v) if isinstance(v, set) else v for key, v in found.items()}
        values: dict[str, Any] = json.loads(json.dumps(plain, default=str))
        return {**values, "inference_mode": True}


class Samples:
    """The sample file, mapped where it is one: ids int32 and learned uint8 [tokens], offsets int64 [samples + 1]."""

    def __init__(self, file: Path | bytes) -> None:
        if isinstance(file, bytes):
            found = load_arrays(file)
        else:
            with safe_open(file, framework="np") as opened:
                found = {name: opened.get_tensor(name) for name in ("ids", "learned", "offsets")}
        self.ids, self.learned, self.offsets = found["ids"], found["learned"], found["offsets"]

    def _slice(self, index: int) -> slice:
        return slice(int(self.offsets[index]), int(self.offsets[index + 1]))

    def targets(self, index: int) -> int:
        """Learned tokens of a sample."""
        return int(self.learned[self._slice(index)].sum())

    def read(self, index: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """ids [L], positions whose prediction is learned [T], what they predict [T]; all int64."""
        part = self._slice(index)
        ids = torch.from_numpy(self.ids[part].astype(np.int64)).to(device)
        learned = torch.from_numpy(np.flatnonzero(self.learned[part])).to(device)
        return ids, learned - 1, ids[learned]


def _tensors(checkpoint: Path | Mapping[str, bytes], name: str) -> dict[str, Tensor]:
    if isinstance(checkpoint, Path):
        return load_file(checkpoint / name)
    return load(checkpoint[name])


def _adapted(job: Job) -> Any:
    """Stock's model in evaluation mode (it has no dropout of its own) with a trainable adapter, the same everywhere."""
    recipe = job.recipe
    transformers.utils.logging.disable_progress_bar()
    base = transformers.AutoModelForCausalLM.from_pretrained(
        job.model, dtype=getattr(torch, recipe.dtype)
    )
    config = LoraConfig(
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        lora_dropout=recipe.dropout,
        target_modules=f"{LAYERS}(?:{'|'.join(recipe.targets)})",
        task_type="CAUSAL_LM",
    )
    torch.manual_seed(recipe.seed)
    with warnings.catch_warnings():
        # peft asks transformers by a name that is going away
        warnings.simplefilter("ignore", FutureWarning)
        model = get_peft_model(base, config)
    model.to(torch.device(job.device)).eval()
    for name, module in model.named_modules():
        if "lora_dropout" in name:
            module.train()
    return model


def _flattened(parameters: list[torch.nn.Parameter]) -> torch.nn.Parameter:
    """One float32 vector that holds them, each made a view of its part."""
    whole = torch.cat([p.detach().reshape(-1).to(torch.float32) for p in parameters])
    start = 0
    for parameter in parameters:
        part = whole[start : start + parameter.numel()]
        parameter.data = part.view(parameter.shape)
        start += parameter.numel()
    return torch.nn.Parameter(whole)
