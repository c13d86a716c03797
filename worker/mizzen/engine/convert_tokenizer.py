# SPDX-License-Identifier: Apache-2.0
"""Program that converts a model's tokenizer to `tokenizer.json`: `convert_tokenizer FOLDER SOURCE OUTPUT`.

`tokenizer_json` runs it as a child process. The last line of its standard error is the reason of a failure.
"""

from __future__ import annotations

import importlib.util
import json
import resource
import sys
import tempfile
from pathlib import Path
from typing import Any

MAX_CPU_SECONDS = 600
MAX_MEMORY_BYTES = 8 * 1024**3
"""Maximum size of the address space."""
UNLISTED_SPECIAL_TOKENS = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]",
    "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""Special tokens, by id, of a `tekken.json` that does not list them, as in Mistral's library."""
UNLISTED_VERSIONS = ("v3", "v7")
"""Versions of `tekken.json` that may leave out the list of special tokens."""


def main(folder: str, source: str, output: str) -> None:
    """Convert the tokenizer `source` in a model folder, and write the result to the file `output`.

    Raises:
        SystemExit: the conversion fails; the message says why.
    """
    wanted = (
        ("transformers", "sentencepiece", "google.protobuf")
        if source == "tokenizer.model"
        else ("transformers",)
    )
    missing = [name for name in wanted if not is_installed(name)]
    if missing:
        raise SystemExit(f"Python packages are missing: pip install 'mizzen[worker]' ({', '.join(missing)})")
    try:
        convert = convert_tekken if source == "tekken.json" else convert_sentencepiece
        content = convert(Path(folder))
    except Exception as error:  # the libraries raise many kinds of errors for damaged files
        reason = " ".join(str(error).split()) or type(error).__name__
        raise SystemExit(reason[:400]) from error
    Path(output).write_text(content, encoding="utf-8")


def is_installed(name: str) -> bool:
    """Return whether a module can be imported."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def convert_sentencepiece(folder: Path) -> str:
    """Return the tokenizer of a folder with `tokenizer.model`, as JSON; token ids are Transformers'."""
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False
    )
    return tokenizer.backend_tokenizer.to_str()


def convert_tekken(folder: Path) -> str:
    """Return the tokenizer of a folder with `tekken.json`, as JSON; `<s>` begins each text, as in Mistral's.

    Raises:
        ValueError: the file does not list its special tokens, although its version must do so.
    """
    from tokenizers import processors
    from transformers.integrations.mistral.tokenizer import MistralConverter

    with tempfile.TemporaryDirectory() as scratch:
        path = list_special_tokens(folder / "tekken.json", Path(scratch))
        tokenizer = MistralConverter(str(path)).converted()
    begin = tokenizer.token_to_id("<s>")
    if begin is not None:
        added = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", begin)]
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, added])
    return tokenizer.to_str()


def list_special_tokens(path: Path, scratch: Path) -> Path:
    """Return a `tekken.json` that lists its special tokens: `path`, or else a complete copy in `scratch`.

    Raises:
        ValueError: the file does not list its special tokens, although its version must do so.
    """
    content = json.loads(path.read_bytes())
    if content.get("special_tokens") is not None:
        return path
    version = content["config"].get("version")
    if version not in UNLISTED_VERSIONS:
        raise ValueError(
            f"its version is {version}, and it does not list its special tokens; only the versions "
            f"{' and '.join(UNLISTED_VERSIONS)} may leave them out"
        )
    content["special_tokens"] = [
        {"rank": rank, "token_str": token, "is_control": True}
        for rank, token in enumerate(UNLISTED_SPECIAL_TOKENS)
    ]
    copy = scratch / path.name
    copy.write_text(json.dumps(content), encoding="utf-8")
    return copy


def limit_resources() -> None:
    """Limit the CPU time and the memory of this process; lower limits stay."""
    for kind, wanted in ((resource.RLIMIT_CPU, MAX_CPU_SECONDS), (resource.RLIMIT_AS, MAX_MEMORY_BYTES)):
        limit = min((n for n in resource.getrlimit(kind) if n != resource.RLIM_INFINITY), default=wanted)
        limit = min(limit, wanted)
        resource.setrlimit(kind, (limit, limit))


if __name__ == "__main__":
    limit_resources()
    main(*sys.argv[1:])
