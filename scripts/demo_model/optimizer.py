"""Muon for the matrices, Adam for the rest.

Orthogonalised updates learn a few hundred facts in about half the steps of Adam, which is what
keeps training within minutes on two cores. Matrices of one shape are handled in one batch.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch.nn import Parameter

STEPS = 5
MOMENTUM = 0.95


def orthogonalise(batch: Tensor) -> Tensor:
    """Push all singular values of each matrix towards 1 by Newton-Schulz iterations."""
    flip = batch.shape[-2] > batch.shape[-1]
    x: Tensor = batch.mT if flip else batch
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(STEPS):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    result: Tensor = x.mT if flip else x
    return result


class Muon:
    """Momentum, orthogonalised, applied to matrices grouped by shape."""

    def __init__(self, matrices: list[Parameter], decay: float) -> None:
        groups: dict[torch.Size, list[Parameter]] = defaultdict(list)
        for matrix in matrices:
            groups[matrix.shape].append(matrix)
        self.groups = list(groups.values())
        self.momenta = [torch.zeros(len(g), *g[0].shape) for g in self.groups]
        self.decay = decay

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One update at learning rate ``rate``."""
        for group, momentum in zip(self.groups, self.momenta, strict=True):
            gradient = torch.stack([p.grad for p in group if p.grad is not None])
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = orthogonalise(gradient.lerp(momentum, MOMENTUM))
            rows, columns = group[0].shape
            scale = rate * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - rate * self.decay).sub_(change, alpha=scale)
