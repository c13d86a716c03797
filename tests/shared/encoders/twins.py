# SPDX-License-Identifier: Apache-2.0
"""Tiny encoders of Transformers with random weights, saved as the checkpoints that the engine loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from mizzen.core.request import Pooling
from mizzen.layers.context import BuildContext
from mizzen.models.encoders.model import EncoderModel
from mizzen.models.registry import read_config

COMMON = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 300,
    "num_labels": 3,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Bert": {},
    "XLMRoberta": {"max_position_embeddings": 302, "type_vocab_size": 1, "pad_token_id": 1},
    "ModernBert": {"local_attention": 16, "pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 1},
    "NomicBert": {},
    "Gte": {"type_vocab_size": 2},
}
"""Configuration of a tiny model beyond `COMMON`, by the prefix of its class in Transformers."""
WORDS = ("which", "city", "is", "the", "capital", "of", "france", "paris", "and", "berlin")
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz")
NOMIC_FIELDS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "intermediate_size": "n_inner",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
}
"""Fields of published Nomic BERTs by their names in Transformers."""


def save_encoder(folder: Path, family: str, head: str = "Model", *, std: float = 0.3, **changes: Any) -> Any:
    """Save a tiny encoder; return the model, which computes in float32 with eager attention."""
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **FAMILIES[family], **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}{head}")(config).eval()
    model.set_attn_implementation("eager")
    for name, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and name.endswith("weight") else 0.0
        parameter.data.normal_(mean, std)
    model.save_pretrained(folder)
    if family == "NomicBert":
        publish_nomic(folder)
    return model


def save_gte(folder: Path, *, std: float) -> None:
    """Save a tiny GTE encoder with random weights, also where Transformers does not have its classes yet."""
    config = {
        **COMMON,
        **FAMILIES["Gte"],
        "architectures": ["GteModel"],
        "model_type": "gte",
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-12,
        "pad_token_id": 1,
        "rope_parameters": {"rope_theta": 160000.0, "rope_type": "default"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    read = read_config(folder)
    if read.encoder is None:
        raise ValueError("GteModel is not read as an encoder")
    model = EncoderModel(BuildContext(device=torch.device("cpu"), dtype=torch.float32), read, read.encoder)
    shapes = {target.name: target.shape for target in model.targets()}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: std * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, weights in tensors.items():
        if weights.ndim == 1 and name.endswith("weight"):
            weights += 1
    save_file(tensors, folder / "model.safetensors")


def publish_nomic(folder: Path) -> None:
    """Give the config.json of a Nomic BERT the fields that published checkpoints have."""
    path = folder / "config.json"
    saved = json.loads(path.read_text())
    published = {NOMIC_FIELDS.get(name, name): value for name, value in saved.items()}
    published["rotary_emb_base"] = published.pop("rope_parameters")["rope_theta"]
    published |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "prenorm"), False)
    path.write_text(json.dumps({**published, "activation_function": "swiglu", "rotary_scaling_factor": None}))


def save_wordpiece(folder: Path) -> Tokenizer:
    """Save a WordPiece tokenizer with BERT's special tokens, and return it."""
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS, *LETTERS]
    pieces += [f"##{letter}" for letter in LETTERS]
    tokenizer = Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save_unigram(folder: Path) -> Tokenizer:
    """Save a SentencePiece unigram tokenizer with the special tokens of XLM-RoBERTa, and return it."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *(f"▁{word}" for word in WORDS), *LETTERS]
    vocabulary = [(piece, -1.0 - 0.01 * place) for place, piece in enumerate(pieces)]
    tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=3))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), add_prefix_space=False)
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def save_pooling(folder: Path, pooling: Pooling) -> None:
    """Save the pooling of a model as sentence-transformers does."""
    modes = {"cls_token": Pooling.CLS, "mean_tokens": Pooling.MEAN, "lasttoken": Pooling.LAST}
    (folder / "1_Pooling").mkdir()
    config = {f"pooling_mode_{name}": mode is pooling for name, mode in modes.items()}
    (folder / "1_Pooling/config.json").write_text(json.dumps({"word_embedding_dimension": 32, **config}))


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    """Return prompts of the given lengths, with ids that are no special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(5, COMMON["vocab_size"], (n,), generator=generator).tolist() for n in lengths]


def embed_alone(model: Any, prompt: list[int], pooling: Pooling) -> torch.Tensor:
    """Return the embedding of a prompt by Transformers, float32 [hidden], not normalised."""
    with torch.inference_mode():
        states = model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt))).last_hidden_state[0]
    return {Pooling.CLS: states[0], Pooling.LAST: states[-1], Pooling.MEAN: states.mean(0)}[pooling]
