"""A small pre-norm Transformer encoder in PyTorch that takes its attention function as an argument.

``encoder(x, attend)`` calls ``attend(layer, query, key, value)`` in every layer. The experiments
implement laws, rotary positions, measurements and controls in that function, so that the same trained
model runs with all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import experiment
import numpy as np
import torch
from torch import Tensor, nn

import isentropic as it
from isentropic.drift import CalibrationReport
from isentropic.laws import AffineLog

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Laws = Sequence[it.laws.Law | None]


class Block(nn.Module):
    """Self-attention and a two-layer perceptron, each with a layer norm before it and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.split = nn.Linear(width, 3 * width)
        self.join = nn.Linear(width, width)
        self.before_perceptron = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        heads = self.split(self.before_attention(x)).unflatten(-1, (3 * self.heads, -1))
        attended = attend(*heads.transpose(1, 2).chunk(3, dim=1))
        x = x + self.join(attended.transpose(1, 2).flatten(-2))
        return x + self.perceptron(self.before_perceptron(x))


class Encoder(nn.Module):
    """`layers` blocks and a final layer norm, from (batch, n, width) to (batch, n, width)."""

    def __init__(self, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, attend: Attend) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x, lambda *heads, i=i: attend(i, *heads))
        return self.norm(x)


def descend(
    model: nn.Module,
    loss: Callable[[], Tensor],
    steps: int,
    rate: float,
    *,
    least: float,
    weight_decay: float,
) -> None:
    """Steps of AdamW with clipped gradients. `loss` is called for each.

    The rate rises in the first twentieth of the steps, and falls to the part `least` of it.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay)
    warm = max(1, steps // 20)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / warm, max(least, 1 - i / steps))
    )
    for _ in range(steps):
        value = loss()
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        experiment.advance()


def loss_of_next(logits: Tensor, tokens: Tensor) -> Tensor:
    """−log p of each token but the first, in the mean, from logits (count, n − 1, ·)."""
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def attention_with(laws: Laws) -> Attend:
    """Attention with a law per layer."""
    return lambda layer, q, k, v: it.attention(q, k, v, law=laws[layer])


def calibrate(
    forward: Callable[[Attend], object],
    layers: int,
    reference_length: int,
    *,
    prepare: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda q, k: (q, k),
    rows: slice = slice(None),
) -> Laws:
    """Fit a law to each layer that keeps its entropy at that of the reference length.

    The law of a layer is fitted while the laws of the layers before it are applied. ``forward(attend)``
    runs the model on samples of several lengths. ``prepare(q, k)`` returns the queries and keys whose
    products are the logits. `rows` selects the queries whose entropy is kept constant.
    """
    laws: list = [None] * layers
    for layer in range(layers):
        samples: list = []

        def attend(i: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k = prepare(q, k)
            if i == layer:  # noqa: B023
                samples.append((q[..., rows, :], k))  # noqa: B023
            return it.attention(q, k, v, law=laws[i])

        forward(attend)
        report = it.drift.calibrate(samples, reference_length=reference_length)
        laws[layer] = affine(report, samples[0][0])
    return laws


def affine(report: CalibrationReport, like: Tensor) -> AffineLog:
    """The law ``1 + slope · log(n/reference)`` of each head, by least squares through the factors.

    Each length is weighted by its number of logits.
    """
    x = np.log(report.lengths / report.reference_length)[:, None]
    factor = report.factors[:, 0]
    weight = np.where(np.isnan(factor), 0.0, (report.counts * report.lengths)[:, None])
    far = np.where(np.abs(x) > 0.05, weight, 0.0)  # nearer lengths do not tell the slope
    rise, moment = np.nan_to_num(factor - 1), (far * x**2).sum(axis=0)
    slope = (far * x * rise).sum(axis=0) / np.where(moment > 0, moment, np.inf)
    lowest = (1 + slope * np.where(weight > 0, x, 0)).min(axis=0)
    minimum = np.maximum(lowest, np.fmin.reduce(factor, axis=0, initial=1.0))
    intercept = 1 - slope * math.log(report.reference_length)
    return AffineLog(*(torch.as_tensor(a).to(like) for a in (slope, intercept, minimum)))
