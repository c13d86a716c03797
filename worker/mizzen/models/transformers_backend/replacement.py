# SPDX-License-Identifier: Apache-2.0
"""Replaces modules of a Transformers model by Mizzen's layers, along its tensor parallel plan."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from torch import nn

from mizzen.layers.activation import ActivationFunction
from mizzen.layers.context import BuildContext
from mizzen.layers.embedding import Head, TiedHead, TokenEmbedding
from mizzen.layers.linear import MergedColumnParallelLinear, RowParallelLinear, name_rows
from mizzen.layers.norm import RMSNorm
from mizzen.models.block import Activation
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend import recognition
from mizzen.models.transformers_backend.linears import (
    ColumnLinear,
    EmbeddingModule,
    GatedMLP,
    HeadModule,
    LinearGroup,
    LinearGroupMember,
    NormModule,
    Replacement,
    RowLinear,
)
from mizzen.models.transformers_backend.parameters import keeps_float32
from mizzen.models.transformers_backend.recognition import DOWN, GATE, UP

QKV = ("q_proj", "k_proj", "v_proj")
COLUMN, PACKED, ROW = "colwise", "packed_colwise", "rowwise"
REPLICATED = (
    "colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep", "replicate",
    "replicated_with_grad_allreduce", "keep_full_weight",
)  # fmt: skip
"""Styles whose layers every rank holds completely, which gives the same result."""
KNOWN = (COLUMN, PACKED, ROW, *REPLICATED)


@dataclass(frozen=True, slots=True)
class Plan:
    """Tensor parallel plan of a decoder: the style of each module."""

    architecture: str
    styles: dict[str, str]
    """Style by name of the module in the decoder, in which `*` matches any number."""
    ranks: int

    @classmethod
    def of_model(cls, model: Any, ranks: int) -> Plan:
        """Return the plan of a model for a number of ranks.

        Raises:
            ConfigError: there are several ranks, and the model has no plan, or one that cannot be followed.
        """
        architecture = type(model).__name__
        styles = dict(getattr(model.config, "base_model_tp_plan", None) or {})
        unknown = {name: style for name, style in styles.items() if style not in KNOWN}
        if ranks == 1:
            return cls(architecture, {name: style for name, style in styles.items() if style in KNOWN}, ranks)
        if not styles:
            raise ConfigError(
                f"{architecture} has no tensor parallel plan in Transformers (base_model_tp_plan): use "
                "--tensor 1"
            )
        for name, style in unknown.items():
            raise ConfigError(
                f"{architecture} cannot be sharded: its tensor parallel plan has {style} for {name}, which "
                "is not supported. Use --tensor 1"
            )
        return cls(architecture, styles, ranks)

    def style(self, name: str) -> str:
        """Return the style of a module; an empty string if every rank holds it completely."""
        style = self.styles.get(re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name), "")
        return "" if style in REPLICATED else style


class Replacer:
    """Replaces the modules of one model."""

    def __init__(self, build: BuildContext, model: Any, *, recognise: bool) -> None:
        """Prepare the replacement.

        Args:
            build: Settings of Mizzen's layers.
            model: Causal language model on the meta device.
            recognise: Whether norms, feed-forward blocks and rotations are replaced, too.
        """
        self.build = build
        self.model = model
        self.recognise = recognise
        self.prefix = f"{model.base_model_prefix}."
        self.base: Any = getattr(model, model.base_model_prefix)
        self.plan = Plan.of_model(model, build.mesh.tensor.size)
        self.norms: dict[tuple[type, Any, int], tuple[float, bool] | None] = {}

    def replace_all(self) -> None:
        """Replace all modules of the decoder that have a replacement, apart from the embedding.

        Raises:
            ConfigError: a module that the plan shards cannot be sharded.
        """
        try:
            self.replace_children("", self.base)
        except ValueError as error:
            raise ConfigError(f"{self.plan.architecture} cannot be sharded: {error}") from error
        self.check_plan()

    def replace_children(self, name: str, module: nn.Module) -> None:
        """Replace the descendants of a module named `name` in the decoder."""
        prefix = f"{name}." if name else ""
        if self.can_merge_qkv(prefix, module):
            self.merge_qkv(prefix, module)
        for child_name, child in list(module.named_children()):
            full = prefix + child_name
            if self.recognise and (replaced := self.replace_recognised(full, child)) is not None:
                module._modules[child_name] = replaced
            elif type(child) is nn.Linear and keeps_float32(self.model, self.prefix + full, self.build.dtype):
                continue
            elif type(child) is nn.Linear:
                module._modules[child_name] = self.make_linear(full, child)
            elif not isinstance(child, Replacement | LinearGroupMember):
                self.replace_children(full, child)

    def replace_recognised(self, name: str, module: Any) -> nn.Module | None:
        """Return the replacement of a norm or feed-forward block; None if the module is not recognised."""
        key = (
            type(module),
            recognition.read_epsilon(module),
            sum(parameter.numel() for parameter in module._parameters.values() if parameter is not None),
        )
        if key not in self.norms:
            self.norms[key] = recognition.recognise_norm(module)
        if (norm := self.norms[key]) is not None:
            epsilon, plus_one = norm
            size = module.weight.numel()
            return NormModule(RMSNorm(self.build, self.prefix + name, size, epsilon, plus_one=plus_one))
        activation = recognition.recognise_mlp(module)
        styles = [self.plan.style(f"{name}.{part}") for part in (GATE, UP, DOWN)]
        if activation is None or styles not in ([COLUMN, COLUMN, ROW], ["", "", ""]):
            return None
        gate, down = getattr(module, GATE), getattr(module, DOWN)
        size, hidden = gate.weight.shape
        sharded = bool(styles[0])
        shard = self.build.mesh.tensor.shard(size, "intermediate size") if sharded else slice(0, size)
        names = [f"{self.prefix}{name}.{part}" for part in (GATE, UP)]
        gate_up = MergedColumnParallelLinear(
            self.build,
            name_rows(names, [size] * 2, [shard] * 2),
            hidden,
            gate.bias is not None,
            swiglu=activation is Activation.SILU,
        )
        return GatedMLP(
            gate_up,
            self.row_parallel(f"{name}.{DOWN}", down) if sharded else self.replicated(f"{name}.{DOWN}", down),
            ActivationFunction(self.build, activation),
            self.build.collectives if sharded else None,
        )

    def can_merge_qkv(self, prefix: str, module: Any) -> bool:
        """Return whether the projections of queries, keys and values can be merged."""
        linears: list[Any] = [getattr(module, name, None) for name in QKV]
        if any(type(linear) is not nn.Linear for linear in linears):
            return False
        same = len({(linear.in_features, linear.bias is None) for linear in linears}) == 1
        return same and len({self.plan.style(prefix + name) for name in QKV}) == 1

    def merge_qkv(self, prefix: str, module: nn.Module) -> None:
        """Merge the projections of queries, keys and values of an attention module."""
        linears = [getattr(module, name) for name in QKV]
        shards = [
            self.head_shard(prefix + name, module, linear) for name, linear in zip(QKV, linears, strict=True)
        ]
        rows = name_rows(
            [self.prefix + prefix + name for name in QKV], [linear.out_features for linear in linears], shards
        )
        merged = MergedColumnParallelLinear(
            self.build, rows, linears[0].in_features, linears[0].bias is not None
        )
        group = LinearGroup(merged, [shard.stop - shard.start for shard in shards])
        module.mizzen_qkv = group
        for name, part in zip(QKV, group.members, strict=True):
            module._modules[name] = part

    def head_shard(self, name: str, module: nn.Module, linear: nn.Linear) -> slice:
        """Return the output rows of a projection that this rank holds; they are whole heads."""
        if not self.plan.style(name):
            return slice(0, linear.out_features)
        size = getattr(module, "head_dim", None)
        if not isinstance(size, int) or linear.out_features % size:
            return self.build.mesh.tensor.shard(linear.out_features, f"output rows of {name}")
        heads = self.build.mesh.tensor.replicated_shard(linear.out_features // size, f"heads of {name}")
        return slice(heads.start * size, heads.stop * size)

    def make_linear(self, name: str, linear: nn.Linear) -> nn.Module:
        """Return the replacement of a linear layer."""
        style = self.plan.style(name)
        if style == ROW:
            return RowLinear(self.row_parallel(name, linear), self.build.collectives)
        if not style:
            return ColumnLinear(self.replicated(name, linear))
        parts = 2 if style == PACKED else 1
        size = linear.out_features // parts
        shard = self.build.mesh.tensor.shard(size, f"output rows of {name}")
        rows = name_rows([self.prefix + name] * parts, [size] * parts, [shard] * parts)
        return ColumnLinear(
            MergedColumnParallelLinear(self.build, rows, linear.in_features, linear.bias is not None)
        )

    def row_parallel(self, name: str, linear: nn.Linear) -> RowParallelLinear:
        """Return a linear layer that is sharded by input columns."""
        rows, columns = linear.weight.shape
        return RowParallelLinear(self.build, self.prefix + name, rows, columns, linear.bias is not None)

    def replicated(
        self, name: str, linear: nn.Linear, prefix: str | None = None
    ) -> MergedColumnParallelLinear:
        """Return a linear layer that every rank holds completely."""
        rows, columns = linear.weight.shape
        full = (self.prefix if prefix is None else prefix) + name
        return MergedColumnParallelLinear(
            self.build, name_rows([full], [rows], [slice(0, rows)]), columns, linear.bias is not None
        )

    def check_plan(self) -> None:
        """Check that every module that the plan shards was replaced.

        Raises:
            ConfigError: a module was not.
        """
        for name, module in self.base.named_modules() if self.plan.ranks > 1 else ():
            if self.plan.style(name) and any(True for _ in module.parameters(recurse=False)):
                raise ConfigError(
                    f"{self.plan.architecture} cannot be sharded: {name} is a {type(module).__name__}, not a "
                    "plain linear layer. Use --tensor 1"
                )

    def replace_embedding(self) -> TokenEmbedding | None:
        """Replace the token embedding; return None if it is not a plain table, and is kept."""
        table = self.base.get_input_embeddings()
        if type(table) is not nn.Embedding or table.max_norm is not None:
            return None
        name = find_name(self.base, table)
        embedding = TokenEmbedding(self.build, self.prefix + name, *table.weight.shape)
        self.base.set_submodule(name, EmbeddingModule(embedding))
        return embedding

    def replace_head(self, embedding: TokenEmbedding | None, *, tied: bool) -> None:
        """Replace the output head of the model; `tied` says that it shares the embedding's table."""
        linear = self.model.get_output_embeddings()
        if type(linear) is not nn.Linear:
            return
        name = find_name(self.model, linear)
        if linear.bias is not None or (tied and embedding is None):
            if not tied:
                self.model.set_submodule(name, ColumnLinear(self.replicated(name, linear, prefix="")))
            return
        rows, columns = linear.weight.shape
        head = (
            TiedHead(self.build, embedding)
            if tied and embedding is not None
            else Head(self.build, name, rows, columns)
        )
        self.model.set_submodule(name, HeadModule(head))


def find_name(model: nn.Module, wanted: nn.Module) -> str:
    """Return the name of a module in a model."""
    return next(name for name, module in model.named_modules() if module is wanted)
