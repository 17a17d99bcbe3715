"""NxD's own Llama inference example and its router of experts, lowered by the same harness: which opcodes AWS's own
code brings to this hardware.

`python llama.py NXD_CHECKOUT`, in the environment with torch_xla; what is closed is the tests' stand-in.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch_xla  # isort: skip
import torch
import torch_xla.core.xla_model
import torch_xla.runtime

ROOT = Path(__file__).parents[2]
WORLD = 8


class RmsNorm:
    """Stands in for torch_neuronx's operator of that name."""

    @staticmethod
    def apply(x: Any, weight: Any, eps: float, dim: int) -> Any:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(dim, keepdim=True) + eps)).type_as(x) * weight


def main(checkout: Path) -> None:
    # After torch_xla: it would take a stand-in of libneuronxla for the real one.
    closed = ROOT / "tests" / "neuron" / "packages" / "closed"
    sys.path[:0] = [str(ROOT), str(checkout / "src"), str(checkout / "examples/inference/llama")]
    sys.path.append(str(closed))
    os.environ |= {"NEURON_PLATFORM_TARGET_OVERRIDE": "inf2", "NEURON_LOGICAL_NC_CONFIG": "1"}
    os.environ["NXD_LOG_LEVEL"] = "error"
    warnings.simplefilter("ignore")
    import model as example
    from config import Config
    from neuronx_distributed import NxDParallelState

    from scripts.lowering.hlo import facts

    example.RmsNorm = RmsNorm
    config = Config(1024, 256, 2, 16, 8, 16, 512, dtype=torch.bfloat16)
    opcodes: Counter[str] = Counter()
    for length in (64, 1):
        with NxDParallelState(WORLD, tensor_model_parallel_size=WORLD, lnc_size=1):
            device = torch_xla.device()
            net = example.Transformer(config, 1, 64).eval().to(device)
            tokens = torch.zeros((1, length), dtype=torch.int32)
            last, mask = (
                torch.zeros((1,), dtype=torch.int32),
                torch.ones((1, 64), dtype=torch.int32),
            )
            with torch.no_grad():
                logits = net(*(x.to(device) for x in (tokens, last, mask)))
            text = torch_xla._XLAC._get_xla_tensors_hlo([logits, *net.buffers()])
            torch_xla._XLAC._set_all_reduce_token(str(device), None)
        found = facts(text)
        opcodes |= found.opcodes
        print("prefill" if length > 1 else "decode", dict(found.types))
    print("llama:", " ".join(sorted(opcodes)))
    print("router:", " ".join(sorted(router_opcodes() - set(opcodes))))
    sys.stdout.flush()
    os._exit(0)


def router_opcodes() -> set[str]:
    """Of RouterTopK (modules/moe/routing.py), 8 of 128 experts as in 26B-A4B."""
    from neuronx_distributed import NxDParallelState
    from neuronx_distributed.modules.moe.routing import RouterTopK

    from scripts.lowering.hlo import facts

    with NxDParallelState(WORLD, tensor_model_parallel_size=WORLD, lnc_size=1):
        device = torch_xla.device()
        router = RouterTopK(128, 8, 256, dtype=torch.bfloat16).eval().to(device)
        with torch.no_grad():
            found = router(torch.zeros((1, 64, 256), dtype=torch.bfloat16).to(device))
        return set(facts(torch_xla._XLAC._get_xla_tensors_hlo(list(found))).opcodes)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
