# SPDX-License-Identifier: Apache-2.0
"""Names of a model's tensors in checkpoints, where Transformers renames them or merges those of experts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, rename_source_key

from mizzen.layers.weight_target import WeightTarget
from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend.parameters import whole_target


def name_targets(
    targets: Sequence[WeightTarget], conversions: Sequence[Any], names: Collection[str], prefix: str
) -> list[WeightTarget]:
    """Return targets that have the names of a checkpoint's tensors.

    Args:
        targets: Destinations, with the names of the model's parameters.
        conversions: Transformers' rules for this model.
        names: Names of the tensors in the checkpoint.
        prefix: Prefix of the decoder's parameters, which checkpoints may omit.

    Raises:
        ConfigError: a tensor needs a conversion that is not supported, or parts of it are missing.
    """
    if not conversions:
        return list(targets)
    converters = [rule for rule in conversions if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in conversions if not isinstance(rule, WeightConverter)]
    by_name = {target.name: target for target in targets}
    groups: dict[str, list[WeightTarget]] = {}
    for target in targets:
        groups.setdefault(target.name, []).append(target)
    named: list[WeightTarget] = []
    parts: Counter[str] = Counter()
    for name in names:
        renamed, pattern = rename_source_key(name, renamings, converters)
        model_name = renamed if renamed in by_name else prefix + renamed
        if model_name not in by_name:
            continue
        if pattern is None:
            named += [replace(target, name=name) for target in groups.pop(model_name, ())]
            continue
        target = by_name[model_name]
        converter = next(rule for rule in converters if pattern in rule.source_patterns)
        named.append(part_target(target, converter, pattern, name))
        parts[model_name] += named[-1].destination.numel()
    for name, count in parts.items():
        if count != by_name[name].destination.numel():
            raise ConfigError(f"the checkpoint lacks some of the tensors that make up {name}")
        del groups[name]
    return [*named, *(target for group in groups.values() for target in group)]


def part_target(target: WeightTarget, converter: WeightConverter, pattern: str, name: str) -> WeightTarget:
    """Return the target of a tensor that holds a part of a parameter, as that of one expert.

    Args:
        target: Destination of the whole parameter, [experts, ...].
        converter: Rule that merges tensors into the parameter.
        pattern: Pattern of the rule that matches the tensor's name.
        name: Name of the tensor.

    Raises:
        ConfigError: the rule does anything but to stack the tensors of experts and to concatenate them.
    """
    operations, sources = list(converter.operations), list(converter.source_patterns)
    stacks = bool(operations) and isinstance(operations[0], MergeModulelist) and operations[0].dim == 0
    concatenates = len(operations) == 2 and isinstance(operations[1], Concatenate) and operations[1].dim == 1
    if not stacks or len(operations) > 1 + concatenates or (len(sources) > 1) != concatenates:
        kinds = ", ".join(type(operation).__name__ for operation in operations)
        raise ConfigError(
            f"{name} needs a conversion ({kinds}) that is not supported: save the checkpoint with "
            "Transformers' parameter names, or use another model"
        )
    destination = expert_rows(target.destination, pattern, name)
    if concatenates:
        destination = destination.chunk(len(sources))[sources.index(pattern)]
    return whole_target(name, destination, target.fill)


def expert_rows(parameter: torch.Tensor, pattern: str, name: str) -> torch.Tensor:
    """Return the part of a parameter [experts, ...] that belongs to the expert in a tensor's name."""
    match = re.search(re.escape(pattern).replace(r"\*", r"(\d+)"), name)
    index = -1 if match is None else int(match[1])
    if not 0 <= index < len(parameter):
        raise ConfigError(f"the checkpoint has a tensor {name}, but the model has {len(parameter)} experts")
    return parameter[index]
