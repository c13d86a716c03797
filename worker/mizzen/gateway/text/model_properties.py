# SPDX-License-Identifier: Apache-2.0
"""Properties of the model that an engine serves: task, and settings of embedding models and classifiers.

They come from the engine's `Welcome` and from the model's configuration files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mizzen.common.model_task import Task
from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.wire.messages import Welcome

CONFIG = "config.json"
SENTENCE_CONFIG = "config_sentence_transformers.json"
FILES = (CONFIG, SENTENCE_CONFIG)
"""Files from which the properties are read; both are optional."""
KNOWN_MATRYOSHKA = frozenset({"qwen3"})
"""Values of `model_type` whose embedding models are trained for shortened vectors, although their config.json
does not say so: Qwen3-Embedding."""
QUERY_PROMPTS = ("query", "search_query", "s2p_query", "web_search_query")
DOCUMENT_PROMPTS = ("document", "passage", "search_document", "corpus")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProperties:
    """Properties of a model, as far as its engine and its files state them."""

    task: str = "generate"
    """`generate`, `embed` or `classify`."""
    labels: tuple[str, ...] = ()
    """Names of a classifier's labels, in the order of its logits."""
    activation: str = ""
    """Function that makes probabilities of a classifier's logits: `softmax`, `sigmoid` or `none`."""
    shortens: bool = False
    """True if the model was trained for shortened vectors (Matryoshka)."""
    lengths: tuple[int, ...] = ()
    """The only allowed lengths of shortened vectors; empty if any length is allowed."""
    prompts: Mapping[str, str] = field(default_factory=dict[str, str])
    """Texts that precede an embedding model's inputs, by the kind of input, as sentence-transformers stores
    them."""

    @property
    def query_prompt(self) -> str:
        """Text that precedes queries; empty if the model has none."""
        return self.find_prompt(QUERY_PROMPTS)

    @property
    def document_prompt(self) -> str:
        """Text that precedes documents; empty if the model has none."""
        return self.find_prompt(DOCUMENT_PROMPTS)

    def find_prompt(self, names: tuple[str, ...]) -> str:
        """Return the first prompt among those of the given names; empty if the model has none of them."""
        return next((self.prompts[name] for name in names if name in self.prompts), "")


def read_model_properties(welcome: Welcome, files: Mapping[str, bytes]) -> ModelProperties:
    """Return the properties of an engine's model; `files` holds the contents of the existing `FILES`."""
    config, sentence = read_object(files.get(CONFIG)), read_object(files.get(SENTENCE_CONFIG))
    embeds = POOLING_FILE in welcome.files
    lengths = config.get("matryoshka_dimensions")
    known = str(config.get("model_type", "")) in KNOWN_MATRYOSHKA and embeds
    prompts = sentence.get("prompts")
    task = welcome.served_task
    return ModelProperties(
        task="embed" if task is Task.GENERATE and embeds else str(task),
        labels=welcome.labels,
        activation=welcome.score_activation,
        shortens=bool(config.get("is_matryoshka")) or bool(lengths) or known,
        lengths=tuple(sorted(n for n in lengths if isinstance(n, int))) if isinstance(lengths, list) else (),
        prompts={str(name): str(text) for name, text in prompts.items()} if isinstance(prompts, dict) else {},
    )


def read_object(content: bytes | None) -> dict[str, Any]:
    """Return the JSON object in a file's content; an empty one if the content is something else."""
    try:
        value = json.loads(content or b"{}")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
