# SPDX-License-Identifier: Apache-2.0
"""Encoders: their embeddings equal those of Transformers, alone and in batches of unequal lengths."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from encoders.twins import FAMILIES, embed_alone, random_prompts, save_encoder, save_unigram, save_wordpiece
from mizzen import LLM
from mizzen.core.request import Pooling, Request
from mizzen.core.sampling_params import SamplingParams
from mizzen.engine.config import EngineOptions
from mizzen.engine.encoders.executor import prompt_positions
from mizzen.engine.encoders.loading import log_faster_precision
from mizzen.engine.loading.memory_budget import MemoryShortage
from mizzen.gateway.text.tokenizer import Tokenizer
from mizzen.layers import linear
from mizzen.layers.rope import inverse_frequencies
from mizzen.models.encoders.gte import read_gte_rope
from mizzen.models.hf_fields import ConfigError, Fields
from mizzen.models.registry import read_config, read_fields

OPTIONS: dict[str, Any] = {"device": "cpu", "skip_tokenizer": True, "threads": 1, "check_integrity": True}
LENGTHS = (1, 5, 300, 17, 140, 3, 64)
"""Lengths of prompts: in a layer with a window, some are shorter than it, and some longer than a block."""


def embed(llm: Any, prompts: Any, pooling: Pooling, *, normalize: bool = False) -> Any:
    return llm.embed(prompts, pooling=pooling.value, normalize=normalize)


@pytest.mark.parametrize("family", FAMILIES)
def test_embeddings_equal_those_of_transformers(tmp_path: Path, family: str) -> None:
    model = save_encoder(tmp_path, family)
    prompts = random_prompts(LENGTHS)
    with LLM(tmp_path, prefill_chunk_tokens=310, **OPTIONS) as llm:
        assert llm.engine.info.kv_bytes == llm.engine.info.pages_total == 0
        for pooling in Pooling:
            expected = np.stack([embed_alone(model, prompt, pooling).numpy() for prompt in prompts])
            np.testing.assert_allclose(embed(llm, prompts, pooling), expected, atol=2e-5)
            alone = np.concatenate([embed(llm, [prompt], pooling) for prompt in prompts])
            np.testing.assert_allclose(alone, expected, atol=2e-5)
        unit = embed(llm, prompts, Pooling.MEAN, normalize=True)
        np.testing.assert_allclose(np.linalg.norm(unit, axis=1), 1, atol=1e-6)
        with pytest.raises(ValueError, match="301 tokens"):
            llm.embed([[5] * 301])
        with pytest.raises(ValueError, match="language-model head"):
            llm.generate([[5]])
        assert llm.engine.integrity_faults == 0


@pytest.mark.parametrize("family", ["Bert", "NomicBert"])
def test_products_that_gemms_add_to_the_residual_stream_change_nothing(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU, the GEMMs of large batches add their products, and norms the biases."""
    save_encoder(tmp_path, family)
    prompts, added = random_prompts(LENGTHS), []
    with LLM(tmp_path, **OPTIONS) as llm:
        expected = embed(llm, prompts, Pooling.MEAN)
    start, add = linear.RowParallelLinear.__init__, linear.RowParallelLinear.add_without_bias

    def start_fused(self: Any, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        self.fuses_add = True

    monkeypatch.setattr(linear, "MIN_FUSED_ADD_ROWS", 100)
    monkeypatch.setattr(linear.RowParallelLinear, "__init__", start_fused)
    monkeypatch.setattr(
        linear.RowParallelLinear, "add_without_bias", lambda *args: added.append(add(*args)) or added[-1]
    )
    with LLM(tmp_path, **OPTIONS) as llm:
        added.clear()
        np.testing.assert_allclose(embed(llm, prompts, Pooling.MEAN), expected, atol=2e-5)
        assert added and all(added)
        embed(llm, prompts[:1], Pooling.MEAN)
        assert not added[-1]


def test_a_padding_token_within_a_prompt_has_the_position_of_transformers(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "XLMRoberta")
    prompts = [[5, 1, 6, 1, 1, 7], [8, 9]]
    with LLM(tmp_path, **OPTIONS) as llm:
        vectors = embed(llm, prompts, Pooling.MEAN)
    for vector, prompt in zip(vectors, prompts, strict=True):
        np.testing.assert_allclose(vector, embed_alone(model, prompt, Pooling.MEAN).numpy(), atol=2e-5)


def test_positions_count_from_the_first_token_of_each_prompt(tmp_path: Path) -> None:
    save_encoder(tmp_path, "XLMRoberta")
    encoder = read_config(tmp_path).encoder
    assert encoder is not None
    tokens = np.array([1, 5, 6, 7, 1, 8], np.int32)
    assert prompt_positions(encoder, tokens, np.array([3, 3])).tolist() == [1, 2, 3, 2, 1, 3]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_encoder_computes_in_bfloat16(tmp_path: Path, family: str) -> None:
    model = save_encoder(tmp_path, family, std=0.05)
    prompts = random_prompts(LENGTHS)
    with LLM(tmp_path, dtype="bfloat16", **OPTIONS) as llm:
        vectors = embed(llm, prompts, Pooling.CLS, normalize=True)
    for vector, prompt in zip(vectors, prompts, strict=True):
        expected = torch.nn.functional.normalize(embed_alone(model, prompt, Pooling.CLS), dim=0)
        assert float(vector @ expected.numpy()) > 0.99


@pytest.mark.parametrize(
    ("options", "capability", "logged"),
    [
        ({}, "avx512_bf16", True),
        ({}, "avx512_f", False),
        ({"dtype": "float32"}, "avx512_bf16", False),
        ({"device": "cuda"}, "avx512_bf16", False),
    ],
)
def test_a_faster_precision_of_the_processor_is_logged(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: Any,
    capability: str,
    logged: bool,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {capability: True})
    with caplog.at_level(logging.INFO):
        log_faster_precision(EngineOptions(**{"model": "m", "device": "cpu", **options}))
    assert ("--dtype bfloat16" in caplog.text) == logged


def test_tensors_may_have_a_prefix_and_the_names_of_old_checkpoints(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "Bert")
    path = tmp_path / "model.safetensors"
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    renamed = {}
    for name, tensor in load_file(path).items():
        for new, older in old.items():
            name = name.replace(new, older)
        renamed[f"bert.{name}"] = tensor
    renamed["bert.embeddings.position_ids"] = torch.arange(300)
    renamed["cls.predictions.bias"] = torch.zeros(100)
    save_file(renamed, path, {"format": "pt"})
    with LLM(tmp_path, **OPTIONS) as llm:
        vector = embed(llm, [[5, 6]], Pooling.CLS)[0]
    np.testing.assert_allclose(vector, embed_alone(model, [5, 6], Pooling.CLS).numpy(), atol=2e-5)


def test_a_geglu_modern_bert_of_the_older_format_is_read(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "ModernBert")
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    del fields["layer_types"], fields["rope_parameters"]
    fields |= {"global_attn_every_n_layers": 3, "global_rope_theta": 160000.0, "local_rope_theta": 10000.0}
    path.write_text(json.dumps(fields))
    with LLM(tmp_path, **OPTIONS) as llm:
        vector = embed(llm, random_prompts((70,)), Pooling.MEAN)[0]
    expected = embed_alone(model, random_prompts((70,))[0], Pooling.MEAN)
    np.testing.assert_allclose(vector, expected.numpy(), atol=2e-5)


def test_ntk_of_gte_changes_the_base_and_all_frequencies() -> None:
    fields = Fields({"rope_theta": 160000, "rope_scaling": {"type": "ntk", "factor": 8.0}})
    exponents = torch.arange(0, 64, 2).float() / 64
    expected = (160000 * 8.0) ** -exponents / 8.0 ** (2 / 64)
    torch.testing.assert_close(inverse_frequencies(read_gte_rope(fields, 64), 64), expected)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Bert", {"position_embedding_type": "relative_key"}, "position_embedding_type must be absolute"),
        ("Bert", {"hidden_act": "xielu"}, "hidden_act must be one of silu"),
        ("Bert", {"is_decoder": True}, "is_decoder must be false"),
        ("Bert", {"quantization_config": {"quant_method": "fp8"}}, "quantization_config describes"),
        ("XLMRoberta", {"pad_token_id": -1}, "pad_token_id must be the id"),
        ("XLMRoberta", {"max_position_embeddings": 2}, "max_position_embeddings must be above 2"),
        ("ModernBert", {"layer_types": ["full_attention"]}, "layer_types must list 4 layers"),
        ("NomicBert", {"num_experts": 8, "moe_every_n_layers": 2}, "num_experts must be 0"),
        ("NomicBert", {"rotary_emb_fraction": 0.5}, "rotary_emb_fraction must be 1"),
        ("NomicBert", {"prenorm": True}, "prenorm must be false"),
        ("NomicBert", {"activation_function": "glu"}, "activation_function must be one of swiglu"),
        ("Gte", {"position_embedding_type": "absolute"}, "position_embedding_type must be rope"),
        ("Gte", {"logn_attention_scale": True}, "logn_attention_scale must be false"),
    ],
)
def test_an_unsupported_variant_is_refused_by_its_field(
    tmp_path: Path, family: str, changes: Any, message: str
) -> None:
    save_encoder(tmp_path, family)
    fields = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ConfigError, match=message):
        read_fields(Fields({**fields, **changes}))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tensor": 2}, "--tensor 2 is not supported for encoders"),
        ({"quantization": "fp8"}, "--quantization fp8 is not supported for encoders"),
        ({"context_length": 301}, "--context-length 301 exceeds"),
        ({"kv_cache_tokens": 64}, "--kv-cache-tokens has no effect on encoders"),
    ],
)
def test_an_unsupported_option_is_refused(tmp_path: Path, changes: Any, message: str) -> None:
    save_encoder(tmp_path, "Bert")
    with pytest.raises(ValueError, match=message):
        LLM(tmp_path, **{**OPTIONS, **changes})


def test_a_step_that_does_not_fit_into_memory_is_refused(tmp_path: Path) -> None:
    save_encoder(tmp_path, "Bert")
    with pytest.raises(MemoryShortage, match="lower --prefill-chunk-tokens"):
        LLM(tmp_path, prefill_chunk_tokens=1 << 40, **OPTIONS)


@pytest.mark.parametrize(
    ("limit", "files"),
    [
        (7, {}),
        (None, {"sentence_bert_config.json": {"max_seq_length": 7, "do_lower_case": False}}),
        (None, {"sentence_bert_config.json": {}, "tokenizer_config.json": {"model_max_length": 7}}),
    ],
)
def test_a_shorter_limit_of_prompts_is_kept(tmp_path: Path, limit: int | None, files: Any) -> None:
    save_encoder(tmp_path, "Bert")
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    with LLM(tmp_path, context_length=limit, **OPTIONS) as llm:
        assert embed(llm, [[5] * 7], Pooling.MEAN).shape == (1, 32)
        with pytest.raises(ValueError, match="8 tokens"):
            llm.embed([[5] * 8])


@pytest.mark.parametrize("limit", [10**30, 1e30, None, "512", 300])
def test_a_tokenizer_without_a_limit_leaves_that_of_the_model(tmp_path: Path, limit: Any) -> None:
    save_encoder(tmp_path, "Bert")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": null}')
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"model_max_length": limit}))
    assert read_config(tmp_path).context_length == 300


@pytest.mark.parametrize(("family", "save"), [("Bert", save_wordpiece), ("XLMRoberta", save_unigram)])
def test_texts_get_the_special_tokens_of_the_tokenizer(tmp_path: Path, family: str, save: Any) -> None:
    model, tokenizer = save_encoder(tmp_path, family), save(tmp_path)
    texts = ["Which city is Paris?", "of the"]
    with LLM(tmp_path, **{**OPTIONS, "skip_tokenizer": False}) as llm:
        vectors = embed(llm, texts, Pooling.LAST)
    for vector, text in zip(vectors, texts, strict=True):
        expected = embed_alone(model, tokenizer.encode(text).ids, Pooling.LAST)
        np.testing.assert_allclose(vector, expected.numpy(), atol=2e-5)


def logits_of(model: Any, prompt: list[int], second_start: int = 0) -> np.ndarray:
    """Return the logits of a classifier by Transformers for one prompt."""
    kinds = {"token_type_ids": torch.tensor([[int(0 < second_start <= i) for i in range(len(prompt))]])}
    with torch.inference_mode():
        mask = torch.ones(1, len(prompt))
        return (
            model(torch.tensor([prompt]), attention_mask=mask, **(kinds if second_start else {}))
            .logits[0]
            .numpy()
        )


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Bert", {}),
        ("XLMRoberta", {"num_labels": 1}),
        ("ModernBert", {}),
        ("ModernBert", {"classifier_pooling": "mean", "classifier_bias": True, "norm_bias": True}),
        ("Gte", {"num_labels": 1}),
    ],
)
def test_logits_equal_those_of_transformers(tmp_path: Path, family: str, changes: Any) -> None:
    model = save_encoder(tmp_path, family, "ForSequenceClassification", **changes)
    prompts = random_prompts(LENGTHS)
    with LLM(tmp_path, prefill_chunk_tokens=310, **OPTIONS) as llm:
        info = llm.engine.info
        assert (info.task, len(info.labels)) == ("classify", model.config.num_labels)
        got = llm.classify(prompts, activation="none")
        assert llm.embed(prompts[:2]).shape == (2, 32)
    np.testing.assert_allclose(got, np.stack([logits_of(model, p) for p in prompts]), atol=5e-5)


def test_the_second_part_of_a_pair_has_another_token_type(tmp_path: Path) -> None:
    model = save_encoder(tmp_path, "Bert", "ForSequenceClassification", num_labels=1)
    save_wordpiece(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    pairs = [tokenizer.encode_pair("which city", text) for text in ("paris", "berlin is the capital", "of")]
    assert all(0 < start < len(ids) for ids, start in pairs)
    requests = [
        Request(
            rid=rid,
            prompt=np.array(ids, np.int32),
            sampling=SamplingParams(),
            pooling=Pooling.CLS,
            classify=True,
            second_start=start,
        )
        for rid, (ids, start) in enumerate([*pairs, (pairs[0][0], 0)])
    ]
    results: dict[int, np.ndarray] = {}
    with LLM(tmp_path, **OPTIONS) as llm:
        for request in requests:
            llm.engine.submit(request)
        while llm.engine.busy:
            if (output := llm.engine.step(0.0)) is not None:
                results |= {each.rid: each.vector for each in output.side_outputs.vectors}
    for request in requests:
        expected = logits_of(model, request.prompt.tolist(), request.second_start)
        np.testing.assert_allclose(results[request.rid], expected, atol=5e-5)
    assert abs(results[3] - results[0]) > 1e-3


def test_pairs_are_joined_as_by_the_tokenizer(tmp_path: Path) -> None:
    tokenizer = save_wordpiece(tmp_path)
    ours = Tokenizer.load(tmp_path)
    whole = tokenizer.encode("which city", "the capital of france")
    assert ours.encode_pair("which city", "the capital of france") == (whole.ids, whole.type_ids.index(1))
