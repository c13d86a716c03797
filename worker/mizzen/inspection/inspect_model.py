# SPDX-License-Identifier: Apache-2.0
"""Inspects a model: which implementation serves it, and which memory it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from mizzen.engine.config import EngineOptions
from mizzen.engine.loading.validate import check_model, resolve_precision
from mizzen.inspection.code_check import can_check_code, check_code
from mizzen.inspection.image_support import ImageSupport, describe_images, find_served_images
from mizzen.inspection.memory import (
    MemoryFit,
    count_active,
    count_loaded,
    element_bytes,
    estimate_need,
    fit_memory,
    measure_loaded,
)
from mizzen.inspection.model_files import ModelFiles, WeightFiles
from mizzen.inspection.weight_formats import WeightFormat, measure_formats
from mizzen.layers.sharding import SUGGESTED_SIZES, check_shardable, choose_expert_groups
from mizzen.models.config import ModelConfig
from mizzen.models.encoders.families import find_encoder_family
from mizzen.models.features import list_features
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.model_families import find_family
from mizzen.models.registry import READERS, read_model
from mizzen.models.text_part import TEXT_PARTS
from mizzen.models.transformers_backend.installed import check_installed
from mizzen.quantization.online import AS_STORED, choose_quantization
from mizzen.quantization.reader import read_quantization


class TensorSize(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """A number of GPUs that may share the model: whether it is possible, and otherwise the reason.

    `expert` is the number of groups of these GPUs that hold different experts of a mixture.
    """

    tensor: int
    possible: bool
    reason: str = ""
    expert: int = 1
    weight_bytes: int = 0
    kv_bytes_per_token: int = 0


class AttentionLayers(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Layers with the same kind of attention; `window` is in tokens, or None for full attention."""

    count: int
    window: int | None
    kv_bytes_per_token: int


class Inspection(msgspec.Struct, frozen=True, rename="camel", kw_only=True):
    """Result of an inspection; its fields are the JSON members that `mizzen inspect --json` prints.

    Attributes:
        model: folder, file or source that the user named.
        architectures: `architectures` of config.json.
        family: family of the architecture; empty if it is unknown.
        implementation: "native" for the engine's own implementation, "transformers" for the model's code in
            Transformers, or "none".
        estimated: whether the sizes are estimates from config.json, because the code of a model that runs
            through Transformers was not checked; the engine does so when it starts.
        served: whether the engine serves the model.
        reason: reason why the engine does not serve the model, and a remedy; empty if it does.
        text_only: whether only the text part of the model is served.
        images: images that the engine accepts; None if it accepts none.
        generates: whether the model generates text.
        task: what the model computes: "generate", "embed" or "classify".
        labels: names of a classifier's labels, by index.
        features: differences from a Llama.
        parameters: number of parameters that are loaded; 0 if it is unknown.
        active_parameters: number of parameters that one token uses, the whole embedding and output head
            included; less than `parameters` in a mixture of experts, and 0 if it is unknown.
        dtype: data type of the weights in memory.
        weight_bytes: bytes of all weights in memory.
        file_bytes: bytes of the safetensors files; None without such files.
        quantization: description of quantized weights; empty if they are unquantized, or cannot be read.
        weight_formats: sizes of quantized weights and of the other tensors beside them, by their format;
            empty for unquantized weights, and if the headers of the files were not read.
        kv_bytes_per_token: bytes of the KV of one token in all layers.
        layers: kinds of layers.
        context_length: maximum number of prompt and output tokens of a request.
        tensor_sizes: numbers of GPUs that may share the model.
        gpu: name of the GPU; empty if none was named.
        memory_fits: contexts that fit on GPUs of this kind.
    """

    model: str
    architectures: tuple[str, ...] = ()
    family: str = ""
    implementation: str = "none"
    estimated: bool = False
    served: bool = False
    reason: str = ""
    text_only: bool = False
    images: ImageSupport | None = None
    generates: bool = True
    task: str = "generate"
    labels: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    parameters: int = 0
    active_parameters: int = 0
    dtype: str = ""
    weight_bytes: int = 0
    file_bytes: int | None = None
    quantization: str = ""
    weight_formats: tuple[WeightFormat, ...] = ()
    kv_bytes_per_token: int = 0
    layers: tuple[AttentionLayers, ...] = ()
    context_length: int = 0
    tensor_sizes: tuple[TensorSize, ...] = ()
    gpu: str = ""
    memory_fits: tuple[MemoryFit, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the model fits on at least one of the numbers of GPUs, or nothing speaks against it."""
        return not self.gpu or not self.parameters or any(fit.fits for fit in self.memory_fits)


def inspect_model(
    files: ModelFiles,
    options: EngineOptions,
    *,
    tensors: Sequence[int] = SUGGESTED_SIZES,
    gpu: str = "",
    memory: int = 0,
    code: bool = False,
) -> Inspection:
    """Inspect a model.

    Args:
        files: Files of the model.
        options: Options of the engine; the numbers of GPUs in `tensors` replace its number.
        tensors: Numbers of GPUs that may share the model.
        gpu: Name of the GPU; empty for none.
        memory: Memory of one GPU in bytes.
        code: Whether a model that runs through Transformers is built there without weights, if torch is
            installed, so that the same checks decide as when the engine starts. This takes seconds.

    Raises:
        ValueError: The model does not support one of the options; the message names it.
    """
    fields = files.fields
    names = tuple(fields.strings("architectures")) if fields else ()
    found = (find_encoder_family(name) or find_family(name) for name in names)
    family = next((each.name for each in found if each is not None), "")
    result = Inspection(
        model=files.name,
        architectures=names,
        family=family,
        file_bytes=files.weights.size if files.weights else None,
    )
    if fields is None:
        return msgspec.structs.replace(result, reason=files.problem)
    result = describe_weights(result, files, fields)
    options = replace(options, tensor=1)
    try:
        config = read_model(fields, options.model_implementation)
        if config.implementation != "native":
            check_installed(config.architecture, READERS)
        code = code and config.implementation != "native" and can_check_code()
        if code:
            config = check_code(config, options, fields.values)
    except ConfigError as error:
        return msgspec.structs.replace(result, reason=str(error))
    problem = files.problem
    if not problem and files.weights:
        problem = files.weights.find_problem(files.name, config)
    if problem:
        return msgspec.structs.replace(result, reason=problem)
    check_model(options, config)
    try:
        served = find_served_images(files, options, config)
    except ValueError as error:
        return msgspec.structs.replace(result, reason=str(error))
    images = None
    if served is None:
        config = replace(config, vision=None)
    else:
        element = element_bytes(config, options)
        images = describe_images(served, options, element, estimated=not files.preprocessor)
    if options.quantization != AS_STORED:
        config = replace(config, quantization=choose_quantization(options.quantization, config.quantization))
        result = msgspec.structs.replace(result, quantization=config.quantization.describe())
    weights, parameters = files.weights, count_loaded(config, files.weights)
    kv_bytes = estimate_need(config, options).token_bytes
    groups = [replace(options, tensor=tensor) for tensor in tensors]
    shared = [share_model(config, group, fields if code else None) for group in groups]
    sizes = tuple(tensor_size(*pair, weights=weights) for pair in zip(shared, groups, strict=True))
    return msgspec.structs.replace(
        result,
        implementation=config.implementation,
        estimated=config.implementation != "native" and not code,
        served=True,
        text_only=config.text_tensors is not None and images is None,
        images=images,
        generates=config.generates,
        task=str(config.task),
        labels=config.labels,
        features=list_features(config) if config.implementation == "native" else (),
        parameters=parameters,
        active_parameters=count_active(config, parameters),
        dtype=resolve_precision(options, config),
        weight_bytes=measure_loaded(config, weights, options),
        kv_bytes_per_token=kv_bytes,
        layers=list_layers(config, kv_bytes),
        context_length=config.context_length,
        tensor_sizes=sizes,
        gpu=gpu,
        memory_fits=tuple(
            fit_memory(
                found,
                weights,
                group,
                memory,
                name=gpu,
                context=options.context_length,
                image_bytes=images.step_bytes if images else 0,
            )
            for found, group in zip(shared, groups, strict=True)
            if gpu and isinstance(found, ModelConfig) and parameters
        ),
    )


def describe_weights(result: Inspection, files: ModelFiles, fields: Fields) -> Inspection:
    """Return the inspection with the formats of quantized weights; unchanged if they cannot be read."""
    try:
        quantization = read_quantization(fields)
        if not quantization.schemes:
            return result
        part = next((TEXT_PARTS[name] for name in result.architectures if name in TEXT_PARTS), None)
        formats = ()
        if files.weights is not None:
            formats = measure_formats(files.weights, quantization, part.tensors if part else None)
    except ConfigError:  # it is the reason, too, or a more telling one is
        return result
    return msgspec.structs.replace(result, quantization=quantization.describe(), weight_formats=formats)


def share_model(config: ModelConfig, options: EngineOptions, fields: Fields | None) -> ModelConfig | str:
    """Return the configuration of a model that `options.tensor` GPUs share, or why they cannot share it.

    Args:
        config: Configuration of the model on one GPU.
        options: Options of the engine.
        fields: Fields of config.json of a model whose code is checked; None for other models.
    """
    try:
        if fields is None:
            check_shardable(config, options.tensor)
        elif options.tensor > 1:
            return check_code(config, options, fields.values)
    except ValueError as error:
        return str(error)
    return config


def tensor_size(
    found: ModelConfig | str, options: EngineOptions, *, weights: WeightFiles | None
) -> TensorSize:
    """Return whether `options.tensor` GPUs can share a model, and the bytes that each GPU holds.

    Args:
        found: Result of `share_model`.
        options: Options of the engine.
        weights: Files of the weights; None without such files.
    """
    if isinstance(found, str):
        return TensorSize(tensor=options.tensor, possible=False, reason=found)
    return TensorSize(
        tensor=options.tensor,
        possible=True,
        expert=choose_expert_groups(found, options.tensor),
        weight_bytes=measure_loaded(found, weights, options),
        kv_bytes_per_token=estimate_need(found, options).token_bytes,
    )


def list_layers(config: ModelConfig, kv_bytes: int) -> tuple[AttentionLayers, ...]:
    """Return the layers of a model, grouped by their sliding windows.

    Layers with a sliding window keep the keys and values of all tokens, as layers with full attention do.

    Args:
        config: Configuration of the model.
        kv_bytes: Bytes of the KV of one token in all layers.
    """
    windows = sorted(set(config.windows), key=lambda window: window or 0)
    one_layer = kv_bytes // config.layers
    return tuple(
        AttentionLayers(
            count=config.windows.count(window),
            window=window,
            kv_bytes_per_token=config.windows.count(window) * one_layer,
        )
        for window in windows
    )
