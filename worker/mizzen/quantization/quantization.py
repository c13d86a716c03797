# SPDX-License-Identifier: Apache-2.0
"""Quantization of a whole checkpoint: the scheme of each of its linear layers, and of its KV cache."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.layer_patterns import LayerPattern, split_merged
from mizzen.quantization.schemes import (
    UNQUANTIZED,
    KvScheme,
    Unquantized,
    WeightScheme,
    describe_scheme,
)


@dataclass(frozen=True, slots=True)
class LayerRule:
    """Scheme of all layers that a pattern names."""

    pattern: LayerPattern
    scheme: WeightScheme


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantization:
    """Schemes of a checkpoint."""

    method: str
    """Name of the method or exporter, such as "AWQ"; empty for unquantized weights."""
    rules: tuple[LayerRule, ...] = ()
    """Rules in order; the first rule that names a layer decides its scheme."""
    default: WeightScheme = UNQUANTIZED
    """Scheme of layers that no rule names."""
    kv: KvScheme | None = None
    """8-bit KV cache for which the checkpoint is made; None if its configuration does not describe one."""

    @property
    def schemes(self) -> tuple[WeightScheme, ...]:
        """Schemes of quantized layers that the configuration describes, without duplicates."""
        found = dict.fromkeys((self.default, *(rule.scheme for rule in self.rules)))
        return tuple(scheme for scheme in found if not isinstance(scheme, Unquantized))

    def find_scheme(self, name: str) -> WeightScheme:
        """Return the scheme of a linear layer.

        Args:
            name: Name of the layer in the text model, without `.weight`.

        Raises:
            ConfigError: The layer is merged, such as qkv_proj, and its parts have different schemes.
        """
        for rule in self.rules:
            if rule.pattern.matches(name):
                return rule.scheme
        parts = split_merged(name)
        return self.find_merged_scheme(parts) if parts else self.default

    def find_merged_scheme(self, names: Iterable[str]) -> WeightScheme:
        """Return the scheme of layers that are computed together.

        Raises:
            ConfigError: They have different schemes.
        """
        schemes = {name: self.find_scheme(name) for name in names}
        distinct = dict.fromkeys(schemes.values())
        if len(distinct) > 1:
            shown = ", ".join(f"{name}: {describe_scheme(scheme)}" for name, scheme in schemes.items())
            raise ConfigError(
                f"quantization_config gives different schemes ({shown}) to layers that are computed "
                "together, which is not supported: quantize all of them in the same way, or none"
            )
        return next(iter(distinct), self.default)

    def describe(self) -> str:
        """Return a description of the quantized weights, such as "AWQ: 4-bit integers, groups of 128"."""
        schemes = "; ".join(describe_scheme(scheme) for scheme in self.schemes)
        if self.method and schemes.startswith(self.method):
            return schemes
        return ": ".join(part for part in (self.method, schemes) if part) or describe_scheme(UNQUANTIZED)


def ignore_layers(patterns: Iterable[LayerPattern]) -> tuple[LayerRule, ...]:
    """Return rules that leave the layers that patterns name unquantized."""
    return tuple(LayerRule(pattern, UNQUANTIZED) for pattern in patterns)
