"""The tokenizer of a model folder as `tokenizer.json`, also if the folder has it in another format.

A `tokenizer.model` (SentencePiece) or `tekken.json` (Mistral) is converted by Transformers, in a child
process, because Transformers is large and the file may be damaged. The cache folder stores the result.
"""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from mizzen.common.cache import cache_dir

FILE = "tokenizer.json"
SOURCES = ("tekken.json", "tokenizer.model")
"""Files that are converted if there is no `tokenizer.json`; the first one that exists is used."""
CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files that determine the result besides the source."""
SECONDS = 600.0
"""Maximum duration of a conversion."""
_SECRET = re.compile("key|password|secret|token", re.IGNORECASE)
FORMAT = b"1"
"""Version of the conversion; a new version ignores results that are in the cache."""


class TokenizerConversionError(ValueError):
    """A tokenizer cannot be converted; the message says why, and names a way out."""


def read_tokenizer_json(folder: Path) -> bytes | None:
    """Return the content of a model's `tokenizer.json`, converted if necessary; None if it has no tokenizer.

    Raises:
        TokenizerConversionError: the conversion fails.
        OSError: a file cannot be read.
    """
    if (folder / FILE).is_file():
        return (folder / FILE).read_bytes()
    source = next((name for name in SOURCES if (folder / name).is_file()), None)
    if source is None:
        return None
    cached = cache_dir() / "tokenizers" / f"{_hash_sources(folder, source)}.json"
    try:
        return cached.read_bytes()
    except OSError:
        pass
    content = _convert(folder, source)
    _store(cached, content)
    return content


def _hash_sources(folder: Path, source: str) -> str:
    """Return the SHA-256, in hexadecimal, of the files that determine the result of a conversion."""
    digest = hashlib.sha256(FORMAT)
    for name in (source, *CONFIGURATIONS):
        content = (folder / name).read_bytes() if (folder / name).is_file() else b""
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _convert(folder: Path, source: str) -> bytes:
    """Convert a tokenizer in a child process, which has no access to GPUs and hubs, and knows no secrets.

    Raises:
        TokenizerConversionError: the conversion fails.
    """
    kept = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
    environment = {**kept, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    way_out = f"save the tokenizer as {FILE}, with save_pretrained of Transformers' fast tokenizer"
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / FILE
        command = [sys.executable, "-m", "mizzen.engine.convert_tokenizer", str(folder), source, str(output)]
        try:
            run = subprocess.run(command, env=environment, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TokenizerConversionError(
                f"the conversion of {folder / source} took more than {SECONDS:.0f} s; {way_out}"
            ) from None
        if run.returncode == 0 and output.is_file():
            return output.read_bytes()
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    reason = lines[-1][:500] if lines else f"the process ended with status {run.returncode}"
    raise TokenizerConversionError(f"{folder / source} cannot be converted: {reason}; {way_out}")


def _store(path: Path, content: bytes) -> None:
    """Write a file atomically; do nothing if the cache folder is not writable."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(content)
        os.replace(file.name, path)
    except OSError:
        pass
