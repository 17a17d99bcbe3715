"""Training with the stock model: initial values, batches, the loop."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import Gemma4ForCausalLM, Gemma4TextConfig

from . import attention
from .conversations import Composer, Document
from .geometry import CONTEXT, LAYER_SCALARS, text_config
from .optimizer import Muon
from .tokens import TURN_END

TURN_START, TOOL_RESPONSE, TOOL_RESPONSE_END = 105, 50, 51
BATCH_TOKENS = 2560
LONG_EVERY = 3
# Spread of attention logits at the start. Copying needs sharp attention, and a query's size is a norm
# weight here, which grows slowly by itself.
SHARPNESS = 2.0


@dataclass(frozen=True)
class Batch:
    """Right-padded rows; ``targets`` is -100 where nothing is learned."""

    tokens: Tensor
    targets: Tensor


def build_model(seed: int) -> Gemma4ForCausalLM:
    """A fresh stock model with the fixed layer scalars.

    The scalars shrink the stream a hundredfold in the first two layers. So each layer's output
    norms start at the size of the stream they add to; at 1 they would drown the tokens.
    """
    torch.manual_seed(seed)
    attention.register()
    config = Gemma4TextConfig(**text_config())
    model: Gemma4ForCausalLM = Gemma4ForCausalLM._from_config(
        config, dtype=torch.float32, attn_implementation=attention.NAME
    )
    stream = 1.0
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(std=config.hidden_size**-0.5)
        for layer, scalar in zip(model.model.layers, LAYER_SCALARS, strict=True):
            layer.layer_scalar.fill_(torch.tensor(scalar).bfloat16().float())
            ratio = 0.5 if scalar < 0.1 else 0.8
            for norm in (layer.post_attention_layernorm, layer.post_feedforward_layernorm):
                norm.weight.fill_(ratio * stream)
            stream *= (1 + 2 * ratio**2) ** 0.5 * scalar
            dim = layer.self_attn.k_norm.weight.numel()
            layer.self_attn.k_norm.weight.fill_(dim**-0.5)
            layer.self_attn.q_norm.weight.fill_(SHARPNESS)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and "embed" not in name:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return model


def learned_mask(ids: list[int], learn: str, model_id: int) -> list[bool]:
    """For each token, whether predicting it is learned.

    The first token of an earlier answer is not: at that place the model must write its thought
    channel, and only the template's history lacks it.
    """
    if learn == "all":
        return [False] + [True] * (len(ids) - 1)
    starts = [i for i in range(len(ids) - 1) if ids[i] == TURN_START and ids[i + 1] == model_id]
    mask = [False] * len(ids)
    for start in starts if learn == "turns" else starts[-1:]:
        last, inside = start == starts[-1], True
        for position in range(start + 3, len(ids)):
            mask[position] = inside and (last or position > start + 3)
            inside = inside and ids[position] != TOOL_RESPONSE
            inside = inside or ids[position] == TOOL_RESPONSE_END
            if ids[position] == TURN_END:
                break
    return mask


def make_batch(rows: list[tuple[list[int], list[bool]]]) -> Batch:
    """Pad to the longest row."""
    length = max(len(ids) for ids, _ in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    targets = torch.full((len(rows), length), -100)
    for row, (ids, mask) in enumerate(rows):
        tokens[row, : len(ids)] = torch.tensor(ids)
        wanted = [i if m else -100 for i, m in zip(ids, mask, strict=True)]
        targets[row, : len(ids) - 1] = torch.tensor(wanted[1:])
    return Batch(tokens, targets)


def batches(composer: Composer, tokenizer: Tokenizer) -> Iterator[Batch]:
    """Endless batches of about equal cost, each of documents of about equal length."""
    model_id: int = tokenizer.get_vocab()["model"]
    chance = random.Random(composer.chance.random())
    rounds = 0
    while True:
        documents: list[Document] = composer.pool(long=rounds % LONG_EVERY == 0)
        rounds += 1
        rows = []
        for document in documents:
            ids = tokenizer.encode(document.text).ids[:CONTEXT]
            rows.append((ids, learned_mask(ids, document.learn, model_id)))
        rows.sort(key=lambda row: len(row[0]) + chance.random() * 4)
        groups: list[list[tuple[list[int], list[bool]]]] = [[]]
        for row in rows:
            if len(row[0]) * (len(groups[-1]) + 1) > BATCH_TOKENS and groups[-1]:
                groups.append([])
            groups[-1].append(row)
        chance.shuffle(groups)
        yield from (make_batch(group) for group in groups)


def loss_of(model: Gemma4ForCausalLM, batch: Batch) -> Tensor:
    """Mean loss over the learned tokens; logits are computed for those alone."""
    hidden = model.model(batch.tokens, use_cache=False).last_hidden_state
    wanted = batch.targets != -100
    cap = float(model.config.final_logit_softcapping or 30.0)
    logits = torch.tanh(model.lm_head(hidden[wanted]) / cap) * cap
    return cross_entropy(logits, batch.targets[wanted])


def _adam(model: Gemma4ForCausalLM) -> torch.optim.Adam:
    """Vectors move in proportion to where they start: some norms start at a hundredth."""
    groups = [{"params": [model.model.embed_tokens.weight], "scale": 1.0}]
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            size = float(parameter.detach().abs().mean())
            factor = 5.0 if "q_norm" in name else 2.0
            groups.append({"params": [parameter], "scale": factor * size, "name": name})
    return torch.optim.Adam(groups, lr=1e-3, betas=(0.9, 0.98))


def rate_at(step: int, steps: int) -> float:
    """Short warm-up, flat, then down to nothing over the second half."""
    return min(1.0, (step + 1) / 30, 2.0 * (1 - step / steps) + 0.01)


def train(
    model: Gemma4ForCausalLM, composer: Composer, tokenizer: Tokenizer, steps: int
) -> Iterator[str]:
    """Train in place; yields a line of progress now and then."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    muon, adam = Muon(matrices, decay=0.01), _adam(model)
    model.train()
    stream, begin, recent = batches(composer, tokenizer), time.monotonic(), 0.0
    for step in range(steps):
        rate = rate_at(step, steps)
        loss = loss_of(model, next(stream))
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for g in adam.param_groups for p in g["params"]], 1.0)
        for group in adam.param_groups:
            group["lr"] = 3e-3 * rate * group["scale"]
        adam.step()
        muon.step(0.02 * rate)
        model.zero_grad(set_to_none=True)
        recent += loss.item()
        if (step + 1) % 25 == 0:
            seconds = time.monotonic() - begin
            yield f"step {step + 1}/{steps}  loss {recent / 25:.4f}  {seconds:.0f} s"
            recent = 0.0
    model.eval()
