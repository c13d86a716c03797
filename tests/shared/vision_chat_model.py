# SPDX-License-Identifier: Apache-2.0
"""A tiny random model like Qwen2.5-VL with a tokenizer and a chat template, as a complete folder."""

from __future__ import annotations

import io
import json
from pathlib import Path

import tokenizers
import torch
import transformers
from PIL import Image
from tokenizers import decoders, models, pre_tokenizers
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
)
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' or 'image_url' in part %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif 'text' in part %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


IMAGE_PLACEHOLDER = "<|vision_start|><|image_pad|><|vision_end|>"


def render_question(parts: str) -> str:
    """Return the prompt that the chat template makes of a user's message; images are `IMAGE_PLACEHOLDER`."""
    return f"<|im_start|>user\n{parts}<|im_end|>\n<|im_start|>assistant\n"


def save_vision_chat_model(folder: Path) -> None:
    """Save the model to a folder; its answers are random, but depend on text and images."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(
        models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    text = {
        "vocab_size": len(alphabet) + len(SPECIAL) + 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "eos_token_id": ids["<|im_end|>"],
        "bos_token_id": ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
    }
    tower = {
        "depth": 2,
        "hidden_size": 48,
        "intermediate_size": 40,
        "num_heads": 3,
        "patch_size": 4,
        "out_hidden_size": 32,
        "window_size": 24,
        "fullatt_block_indexes": [1],
    }
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids["<|image_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        video_token_id=len(alphabet) + len(SPECIAL),
    )
    torch.manual_seed(0)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config).float().eval()
    with torch.no_grad():
        for name, weights in model.named_parameters():
            weights.normal_(1.0 if "norm" in name else 0.0, 0.25)
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Qwen2VLImageProcessor",
                "patch_size": 4,
                "merge_size": 2,
                "size": {"shortest_edge": 64, "longest_edge": 4096},
            }
        )
    )


def answer_question(folder: Path, image: bytes, question: str, tokens: int) -> str:
    """Return the greedy answer of Transformers to an image and a question, of at most `tokens` tokens."""
    model = transformers.Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    inputs = processor([Image.open(io.BytesIO(image))], return_tensors="pt")
    placeholders = int(inputs["image_grid_thw"].prod()) // processor.merge_size**2
    text = render_question(IMAGE_PLACEHOLDER + question).replace(
        "<|image_pad|>", "<|image_pad|>" * placeholders
    )
    prompt = tokenizer(text, return_tensors="pt")["input_ids"]
    types = (prompt == model.config.image_token_id).long()
    ids = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        mm_token_type_ids=types,
        max_new_tokens=tokens,
        do_sample=False,
        **inputs,
    )
    return tokenizer.decode(ids[0, prompt.shape[1] :], skip_special_tokens=True)
