# SPDX-License-Identifier: Apache-2.0
"""Runs a model without weights once, to find out how it calls its attention.

The model runs on the meta device, where tensors have shapes but no values. So a model whose control flow
depends on values fails here, and is refused.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from mizzen.models.hf_fields import ConfigError
from mizzen.models.transformers_backend import attention

TOKENS = 6
"""Number of tokens of the run."""
MASKED = "mizzen_masked"
"""Name of an attention implementation like `attention.IMPLEMENTATION`, for which models make masks."""
WINDOW = "mizzen_window"
"""Attribute of a mask: the sliding window."""
GROUPED_EXPERTS = "grouped_mm"
"""Transformers' default implementation of experts, which reads no numbers back from the device."""
META_EXPERTS = "batched_mm"
"""Another such implementation, which runs on the meta device with any dtype."""
HARMLESS = {
    "dropout", "scaling", "sliding_window", "softcap", "is_causal", "position_ids", "use_cache",
    "cache_position", "output_attentions", "output_hidden_states", "return_dict", "position_embeddings",
    "logits_to_keep", "num_items_in_batch", "output_router_logits", "layer_idx",
}  # fmt: skip
"""Keyword arguments of attention that `AttentionCall` represents, or that do not change the result."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCall:
    """One call of the attention function."""

    module: nn.Module
    name: str
    """Name of the module in the model."""
    heads: int
    kv_heads: int
    head_dim: int
    scale: float | None
    """Factor of the query-key products; None for 1 / sqrt(head_dim)."""
    softcap: float | None
    """Bound of the scores; None for none."""
    window: int | None
    """Sliding window by the keyword argument; None if it is not given."""
    mask: torch.Tensor | None


class Recorder:
    """Receives the attention calls of a run on the meta device."""

    def __init__(self, model: nn.Module) -> None:
        self.names = {module: name for name, module in model.named_modules()}
        self.calls: list[AttentionCall] = []

    def __call__(self, inputs: attention.AttentionInputs) -> torch.Tensor:
        """Record a call; return a result [1, tokens, heads, head_dim] on the meta device."""
        module, query, key, value, mask, options = inputs
        name = self.names.get(module, type(module).__name__)
        check_options(name, options)
        check_shapes(name, query, key, value)
        window, cap = options.get("sliding_window"), options.get("softcap")
        self.calls.append(
            AttentionCall(
                module=module,
                name=name,
                heads=query.shape[1],
                kv_heads=key.shape[1],
                head_dim=query.shape[3],
                scale=read_scale(name, options.get("scaling")),
                softcap=None if not cap else float(cap),
                window=None if not isinstance(window, int) or window <= 0 else window,
                mask=mask,
            )
        )
        return query.transpose(1, 2)


def read_scale(name: str, scale: Any) -> float | None:
    """Return the factor of the query-key products as a number.

    Raises:
        ConfigError: the factor is a tensor, so it may depend on the input.
    """
    if scale is None or isinstance(scale, int | float):
        return None if scale is None else float(scale)
    raise ConfigError(f"{name} cannot be served: the scaling of its attention is not a constant")


def check_options(name: str, options: dict[str, Any]) -> None:
    """Check the keyword arguments of an attention call.

    Raises:
        ConfigError: one is unknown and has a value.
    """
    unknown = sorted(
        key for key in options.keys() - HARMLESS if options[key] is not None and options[key] is not False
    )
    if unknown:
        raise ConfigError(
            f"{name} cannot be served: it passes {', '.join(unknown)} to its attention, which Mizzen "
            "does not support. Use another model"
        )
    if options.get("is_causal") is False:
        raise ConfigError(f"{name} cannot be served: its attention is not causal. Use another model")
    if options.get("dropout"):
        raise ConfigError(f"{name} cannot be served: its attention has dropout")


def check_shapes(name: str, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """Check the shapes of queries, keys and values, each [1, heads, tokens, head_dim].

    Raises:
        ConfigError: keys and values differ in shape, or do not belong to the tokens of the step.
    """
    if query.shape[-1] != value.shape[-1]:
        raise ConfigError(
            f"{name} cannot be served: its queries have the head dim {query.shape[-1]}, but its values have "
            f"{value.shape[-1]} (multi-head latent attention). Use another model"
        )
    one_row = query.dim() == 4 and query.shape[0] == 1 and query.shape[2] == TOKENS
    if not one_row or key.shape != value.shape or key.shape[2] != TOKENS or query.shape[1] % key.shape[1]:
        raise ConfigError(
            f"{name} cannot be served: its queries {list(query.shape)}, keys {list(key.shape)} and values "
            f"{list(value.shape)} are not those of the {TOKENS} tokens of a step. Use another model"
        )


@contextmanager
def receiving(model: Any, implementation: str, receiver: attention.AttentionLayer) -> Iterator[None]:
    """Let a receiver get all attention calls of a model in a `with` block."""
    config = model.config
    before, experts = config._attn_implementation, config._experts_implementation
    held = [(module, getattr(module, attention.ATTRIBUTE, None)) for module in model.modules()]
    for module, _ in held:
        setattr(module, attention.ATTRIBUTE, receiver)
    config._attn_implementation = implementation
    if experts == GROUPED_EXPERTS:
        config._experts_implementation = META_EXPERTS
    try:
        yield
    finally:
        config._attn_implementation, config._experts_implementation = before, experts
        for module, layer in held:
            setattr(module, attention.ATTRIBUTE, layer)


def run_on_meta(
    model: Any,
    receiver: attention.AttentionLayer,
    *,
    implementation: str = attention.IMPLEMENTATION,
    masks: bool = False,
) -> None:
    """Run the decoder of a model on the meta device.

    Args:
        model: Causal language model; its parameters are on the meta device, its buffers may have values.
        receiver: Receives the attention calls.
        implementation: Name of the attention implementation.
        masks: Whether to pass a mask of ones, without which Transformers would look for several sequences.

    Raises:
        ConfigError: the run fails; the message names the operation.
    """
    ids = torch.zeros(1, TOKENS, dtype=torch.int64, device="meta")
    mask = {"attention_mask": torch.ones_like(ids)} if masks else {}
    base = getattr(model, model.base_model_prefix)
    with receiving(model, implementation, receiver), buffers_on_meta(model), torch.inference_mode():
        try:
            base(input_ids=ids, position_ids=ids, use_cache=False, **mask)
        except ConfigError:
            raise
        except Exception as error:  # any operation may fail, in any way
            raise ConfigError(explain_failure(type(model).__name__, error)) from error


def record_calls(model: Any) -> list[AttentionCall]:
    """Return the attention calls of a model on the meta device, in order.

    Raises:
        ConfigError: the model cannot be served; the message names the reason.
    """
    recorder = Recorder(model)
    run_on_meta(model, recorder)
    for call in recorder.calls:
        if call.mask is not None:
            raise ConfigError(
                f"{call.name} cannot be served: it builds the attention mask itself. Use another model"
            )
    return recorder.calls


def explain_failure(architecture: str, error: Exception) -> str:
    """Return the message for a run on the meta device that failed."""
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "/transformers/" in frame.filename
    ]
    place = f" in {frames[-1].name} (`{frames[-1].line}`)" if frames else ""
    reason = str(error).split("\n")[0]
    return (
        f"{architecture} cannot be served: its forward pass fails without weights{place}: {reason}. It may "
        "depend on the values of tensors, which CUDA graphs do not allow: use another model"
    )


@contextmanager
def buffers_on_meta(model: nn.Module) -> Iterator[None]:
    """Move all buffers to the meta device in a `with` block."""
    held = [(module, dict(module._buffers)) for module in model.modules() if module._buffers]
    for module, buffers in held:
        for name, buffer in buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty_like(buffer, device="meta")
    try:
        yield
    finally:
        for module, buffers in held:
            module._buffers.update(buffers)


def make_mask(*, mask_function: Any, config: Any = None, **options: Any) -> torch.Tensor:
    """Make a mask on the meta device, as Transformers' mask interface requires.

    Its attribute `WINDOW` is the sliding window that the mask function means; None for causal attention
    without one.
    """
    mask = torch.empty(1, 1, TOKENS, TOKENS, dtype=torch.bool, device="meta")
    window = getattr(config, "sliding_window", None)
    setattr(mask, WINDOW, find_window(mask_function, window if isinstance(window, int) else None))
    return mask


def find_window(mask_function: Any, window: int | None) -> int | None:
    """Return the sliding window of a mask function, None if it is causal without one.

    Only the first queries and those beyond the first window are compared, with all keys: a mask has window +
    `TOKENS` positions, and the window may be long.

    Raises:
        ConfigError: it is any other function.
    """
    size = (window or 0) + TOKENS
    keys = torch.arange(size)[None, :]
    queries = torch.cat((keys[0, :TOKENS], keys[0, -TOKENS:]))[:, None]
    causal = keys <= queries
    zero = torch.zeros((), dtype=torch.int64)
    try:
        allowed = torch.as_tensor(mask_function(zero, zero, queries, keys)).expand(len(queries), size)
    except Exception as error:  # the function may read tensors on the meta device
        raise ConfigError(f"the model builds the attention mask itself ({error})") from error
    if torch.equal(allowed, causal):
        return None
    if window is not None and torch.equal(allowed, causal & (keys > queries - window)):
        return window
    raise ConfigError("the model's attention mask is neither causal nor a sliding window")


def record_windows(model: Any) -> list[int | None]:
    """Return the sliding window of each attention call of a model on the meta device, by the call's mask.

    Raises:
        ConfigError: a mask is not a causal one or a sliding window, or is made without Transformers' masks.
    """
    AttentionInterface.register(MASKED, attention.attend)
    AttentionMaskInterface.register(MASKED, make_mask)
    recorder, windows = Recorder(model), list[int | None]()
    run_on_meta(model, recorder, implementation=MASKED, masks=True)
    for call in recorder.calls:
        if not hasattr(call.mask, WINDOW):
            raise ConfigError(
                f"{call.name} cannot be served: its attention mask is not one that Transformers makes for "
                "causal or sliding attention. Use another model"
            )
        windows.append(getattr(call.mask, WINDOW))
    return windows
