# SPDX-License-Identifier: Apache-2.0
"""The router of a mixture of experts: it chooses the experts of each token, and their weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from mizzen.layers.context import BuildContext
from mizzen.layers.weight_target import WeightTarget
from mizzen.models.experts_config import ExpertsConfig, Scoring


class ExpertRouter:
    """A linear layer that scores all experts for each token; every rank holds all of it.

    Logits and scores are float32, so that similar scores stay different.
    """

    def __init__(self, build: BuildContext, experts: ExpertsConfig, hidden: int, prefix: str) -> None:
        self.config = experts
        self.prefix = prefix
        self.name = f"{prefix}{experts.names.router}.weight"
        self.bias_name = prefix + experts.names.correction_bias
        dtype = torch.float32 if experts.float32_router else build.dtype
        self.weight = torch.empty(experts.count, hidden, dtype=dtype, device=build.device)
        self.bias = (
            torch.empty(experts.count, dtype=torch.float32, device=build.device)
            if experts.correction_bias
            else None
        )
        self.logit_bias = (
            torch.empty(experts.count, dtype=torch.float32, device=build.device)
            if experts.router_bias
            else None
        )

    def targets(self) -> Iterator[WeightTarget]:
        """Yield the destinations of the checkpoint's tensors."""
        count, hidden = self.weight.shape
        yield WeightTarget(
            name=self.name,
            shape=(count, hidden),
            shard=(slice(0, count), slice(0, hidden)),
            destination=self.weight,
        )
        if self.bias is not None:
            shape = (*self.config.correction_shape, count)
            yield WeightTarget(
                name=self.bias_name,
                shape=shape,
                shard=tuple(slice(0, size) for size in shape),
                destination=self.bias.view(shape),
                fill=0.0,
            )
        if self.logit_bias is not None:
            yield WeightTarget(
                name=f"{self.prefix}{self.config.names.router}.bias",
                shape=(count,),
                shard=(slice(0, count),),
                destination=self.logit_bias,
            )

    def __call__(
        self, x: torch.Tensor, live: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of x [tokens, hidden].

        A token's experts depend on that token alone: among equal scores, the first experts are chosen.

        Args:
            x: Inputs.
            live: Rows that are not padding, bool [tokens]; all by default.

        Returns:
            Indices of the chosen experts, int64 [tokens, experts per token], from the best one on, and the
            weights of their outputs, float32 of the same shape. Padding has no expert: its indices are the
            number of experts, and its weights 0.
        """
        chosen, weights = self.choose_experts(self.compute_logits(x))
        if live is not None:
            padding = ~live[:, None]
            chosen.masked_fill_(padding, self.config.count)
            weights.masked_fill_(padding, 0)
        return chosen, weights

    def choose_experts(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the experts of all rows of logits (float32 [tokens, experts]); see `__call__`."""
        config = self.config
        if config.scoring is Scoring.SPARSEMIXER:
            return mix_sparsely(logits, config.per_token, config.jitter)
        scores = logits.softmax(-1) if config.scoring is Scoring.SOFTMAX else logits.sigmoid()
        preferences = scores if self.bias is None else scores + self.bias
        if config.groups > 1:
            preferences = self.mask_groups(preferences)
        chosen = choose(preferences, config.per_token)
        weights = scores.gather(-1, chosen)
        if config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=config.sum_floor)
        return chosen, weights if config.scale == 1 else weights * config.scale

    def compute_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, float32 [tokens, experts]; the products are summed in float32."""
        if x.is_cuda and x.dtype == self.weight.dtype != torch.float32:
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
            return logits if self.logit_bias is None else logits.add_(self.logit_bias)
        return F.linear(x.float(), self.weight.float(), self.logit_bias)

    def mask_groups(self, preferences: torch.Tensor) -> torch.Tensor:
        """Return the preferences [tokens, experts], with -inf in all but the best groups of each token."""
        grouped = preferences.unflatten(-1, (self.config.groups, -1))
        best = choose(grouped.topk(2, dim=-1).values.sum(-1), self.config.top_groups)
        excluded = torch.ones(grouped.shape[:2], dtype=torch.bool, device=grouped.device)
        excluded.scatter_(1, best, False)
        return grouped.masked_fill(excluded[..., None], float("-inf")).flatten(1)


def mix_sparsely(logits: torch.Tensor, per_token: int, jitter: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts and their weights by SparseMixer; see `Scoring.SPARSEMIXER`.

    Logits are similar to that of a chosen expert if they are lower by at most 2 * jitter times the larger of
    the chosen one's logit and the absolute value of their own.

    Args:
        logits: Logits, float32 [tokens, experts].
        per_token: Number of experts of a token.
        jitter: See `ExpertsConfig.jitter`.

    Returns:
        Indices and weights [tokens, per_token], as `ExpertRouter` returns them.
    """
    chosen = choose(logits, per_token)
    best, others = logits.gather(-1, chosen)[:, :, None], logits[:, None]
    differs = (best - others) / torch.maximum(others.abs(), best) > 2 * jitter
    similar = others.masked_fill(differs, float("-inf"))
    for i in range(1, per_token):
        similar[:, i].scatter_(-1, chosen[:, :i], float("-inf"))
    return chosen, similar.softmax(-1).gather(-1, chosen[:, :, None])[:, :, 0]


def choose(values: torch.Tensor, count: int) -> torch.Tensor:
    """Return the indices of the `count` largest values of each row, from the largest on.

    Unlike `torch.topk`, it chooses the first of equal values, whatever the number of rows.
    """
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]
