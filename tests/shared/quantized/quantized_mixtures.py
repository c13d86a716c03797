# SPDX-License-Identifier: Apache-2.0
"""Tiny random mixtures of experts, and their quantized checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from family_twins import save_twin
from quantized_formats import FORMATS
from quantized_twins import FILE, QuantizedTwin, quantize_twin

ROUTERS = (".gate", ".shared_expert_gate")
"""Ends of the names of matrices that are never quantized."""
MIXTURES: dict[str, dict[str, Any]] = {
    "qwen3-moe": {"num_experts": 10, "num_hidden_layers": 1, "mlp_only_layers": []},
    "qwen2-moe": {"num_hidden_layers": 1, "shared_expert_intermediate_size": 64},
    "glm4-moe": {"num_hidden_layers": 2},
    "minimax-m2": {"num_hidden_layers": 1},
}
"""Twins of families with experts, with few layers; one has a dense layer, two have a shared expert."""


def save_mixture(folder: Path, name: str, *, hidden: int = 128, width: int = 128, **changes: Any) -> Any:
    """Save a tiny mixture with an untied head; return the model of Transformers."""
    sizes = {"hidden_size": hidden, "intermediate_size": width, "moe_intermediate_size": width}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    return save_twin(
        folder, name, **{**sizes, **heads, "tie_word_embeddings": False, **MIXTURES[name], **changes}
    )


def quantize_mixture(source: Path, folder: Path, name: str, **options: Any) -> QuantizedTwin:
    """Write a copy of a mixture whose linear layers but routers and the head are quantized.

    `options` are those of `quantize_twin`; `ignored` names further layers.
    """
    ignored = options.pop("ignored", ())
    layers = [key.removesuffix(".weight") for key in load_file(source / FILE)]
    routers = (layer for layer in layers if layer.endswith(ROUTERS))
    return quantize_twin(source, folder, FORMATS[name], ignored=("lm_head", *routers, *ignored), **options)


def stack_tensors(folder: Path, *, transposed: bool = False) -> None:
    """Replace the tensors of the experts of a Qwen mixture by tensors that hold all experts of a layer.

    Scales of blocks are stacked, too, as Transformers stores them.
    """
    tensors, experts = load_file(folder / FILE), ".mlp.experts."
    groups: dict[tuple[str, str], dict[tuple[int, str], torch.Tensor]] = {}
    for name in [name for name in tensors if experts in name]:
        prefix, _, rest = name.partition(experts)
        expert, part, suffix = rest.split(".")
        stacked = "down_proj" if part == "down_proj" else "gate_up_proj"
        key = (prefix + experts + stacked, suffix.removeprefix("weight"))
        groups.setdefault(key, {})[int(expert), part] = tensors.pop(name)
    for (name, suffix), parts in groups.items():
        rows = [
            torch.cat([tensor for (_, _), tensor in sorted(own)])
            for own in (
                [item for item in parts.items() if item[0][0] == expert]
                for expert in range(1 + max(expert for expert, _ in parts))
            )
        ]
        joined = torch.stack(rows)
        tensors[name + suffix] = (joined.transpose(1, 2) if transposed else joined).contiguous()
    save_file(tensors, folder / FILE, {"format": "pt"})
