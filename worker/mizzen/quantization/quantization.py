# SPDX-License-Identifier: Apache-2.0
"""Quantization of a whole checkpoint: the scheme of each of its linear layers, and of its KV cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from mizzen.models.hf_fields import ConfigError
from mizzen.quantization.layer_patterns import LayerPattern, join_aliases, list_aliases, split_merged
from mizzen.quantization.schemes import (
    UNQUANTIZED,
    KvScheme,
    Unquantized,
    WeightScheme,
    describe_scheme,
)

MANY_LAYERS = 8
"""Number of layers from which the rules that can name none of them are left out first."""


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
    unlisted: frozenset[str] = frozenset()
    """Names, in the files, of layers that are stored unquantized, although the rules may say otherwise."""
    online: bool = False
    """Whether the checkpoint stores unquantized weights, which are quantized while they are loaded."""
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
        return self._find_by_rules(name, self.rules)

    def find_merged_scheme(self, names: Iterable[str]) -> WeightScheme:
        """Return the scheme of layers that are computed together, such as all experts of a mixture.

        Raises:
            ConfigError: They have different schemes. The message names them, or one of each scheme.
        """
        names = tuple(names)
        many = len(names) > MANY_LAYERS
        rules = select_rules(self.rules, names) if many else self.rules
        schemes = {name: self._find_by_rules(name, rules) for name in names}
        examples = {scheme: name for name, scheme in reversed(schemes.items())}
        if len(examples) > 1:
            named = sorted(examples.values(), key=names.index) if many else schemes
            shown = ", ".join(f"{name}: {describe_scheme(schemes[name])}" for name in named)
            raise ConfigError(
                f"quantization_config gives different schemes ({shown}) to layers that are computed "
                "together, which is not supported: quantize all of them in the same way, or none"
            )
        return next(iter(examples), self.default)

    def _find_by_rules(self, name: str, rules: Sequence[LayerRule]) -> WeightScheme:
        """Return the scheme of a layer by rules that include all of its own."""
        if self.unlisted and not self.unlisted.isdisjoint(list_aliases(name)):
            return UNQUANTIZED
        for rule in rules:
            if rule.pattern.matches(name):
                return rule.scheme
        parts = split_merged(name)
        return self.find_merged_scheme(parts) if parts else self.default

    def describe(self) -> str:
        """Return a description of the quantized weights, such as "AWQ: 4-bit integers, groups of 128"."""
        schemes = "; ".join(describe_scheme(scheme) for scheme in self.schemes)
        if self.method and schemes.startswith(self.method):
            return schemes
        return ": ".join(part for part in (self.method, schemes) if part) or describe_scheme(UNQUANTIZED)


def ignore_layers(patterns: Iterable[LayerPattern]) -> tuple[LayerRule, ...]:
    """Return rules that leave the layers that patterns name unquantized."""
    return tuple(LayerRule(pattern, UNQUANTIZED) for pattern in patterns)


def select_rules(rules: Sequence[LayerRule], names: Iterable[str]) -> tuple[LayerRule, ...]:
    """Return the rules that may name one of the layers, in order; a mixture has thousands of layers."""
    joined = "\n".join(join_aliases(name) for name in names)
    return tuple(rule for rule in rules if rule.pattern.may_match(joined))
