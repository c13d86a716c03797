# SPDX-License-Identifier: Apache-2.0
"""The tokenizer of a model folder as `tokenizer.json`, also if the folder has it in another format.

A `tokenizer.model` (SentencePiece) or `tekken.json` (Mistral) is converted by Transformers, in a child
process, because Transformers is large and the file may be damaged. The process has limits on its time and
memory, and few variables of the environment; it is not a sandbox. The cache folder stores the result.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import signal
import site
import subprocess
import sys
import tempfile
from pathlib import Path

from mizzen.common.cache import cache_dir, write_atomically

FILE = "tokenizer.json"
SOURCES = ("tekken.json", "tokenizer.model")
"""Files that are converted if there is no `tokenizer.json`; the first one that exists is used."""
CONFIGURATIONS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "config.json")
"""Files that determine the result besides the source."""
SECONDS = 600.0
"""Maximum duration of a conversion."""
MAX_FILE_BYTES = 256 * 1024 * 1024
"""Maximum size of a file of a tokenizer."""
_KEPT = ("PATH", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR")
"""Variables of the environment that the child process gets, besides all `LC_` variables."""
FORMAT = b"1"
"""Version of the conversion; a new version ignores results that are in the cache."""


class TokenizerConversionError(ValueError):
    """A tokenizer cannot be converted; the message says why, and names a way out."""


def read_tokenizer_json(folder: Path) -> bytes | None:
    """Return the content of a model's `tokenizer.json`, converted if necessary; None if it has no tokenizer.

    Raises:
        TokenizerConversionError: the conversion fails.
        OSError: the file `tokenizer.json` cannot be read.
    """
    if (folder / FILE).is_file():
        return (folder / FILE).read_bytes()
    source = next((name for name in SOURCES if (folder / name).is_file()), None)
    if source is None:
        return None
    try:
        cached = cache_dir() / "tokenizers" / f"{_hash_sources(folder, source)}.json"
        try:
            return cached.read_bytes()
        except OSError:
            pass
        content = _convert(folder, source)
    except OSError as error:
        raise TokenizerConversionError(f"{folder / source} cannot be converted: {error}") from error
    with contextlib.suppress(OSError):  # the cache folder may not be writable
        write_atomically(cached, content, shared=True)
    return content


def _hash_sources(folder: Path, source: str) -> str:
    """Return the SHA-256, in hexadecimal, of the files and the version that determine the result.

    Raises:
        TokenizerConversionError: a file is too large.
        OSError: a file cannot be read.
    """
    digest = hashlib.sha256(FORMAT + f" transformers {_transformers_version()} ".encode())
    for name in (source, *CONFIGURATIONS):
        path = folder / name
        size = path.stat().st_size if path.is_file() else 0
        if size > MAX_FILE_BYTES:
            raise TokenizerConversionError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are read")
        content = path.read_bytes() if size else b""
        digest.update(f"{name} {len(content)} ".encode() + content)
    return digest.hexdigest()


def _transformers_version() -> str:
    try:
        return importlib.metadata.version("transformers")
    except importlib.metadata.PackageNotFoundError:
        return ""


def _child_environment(home: str) -> dict[str, str]:
    """Return the variables of a conversion, which sees no GPUs, and in which Transformers uses no hub."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
    own = {"HOME": home, "PYTHONUSERBASE": site.getuserbase()}  # packages may be those of the user
    return {**kept, **own, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


def _convert(folder: Path, source: str) -> bytes:
    """Convert a tokenizer in a child process.

    Raises:
        TokenizerConversionError: the conversion fails.
        OSError: the process cannot be started, or its result cannot be read.
    """
    way_out = f"save the tokenizer as {FILE}, with save_pretrained of Transformers' fast tokenizer"
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / FILE
        command = [sys.executable, "-P", "-m", "mizzen.engine.convert_tokenizer"]
        command += [str(folder), source, str(output)]
        variables = _child_environment(scratch)
        try:
            run = subprocess.run(command, env=variables, capture_output=True, timeout=SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise TokenizerConversionError(
                f"the conversion of {folder / source} took more than {SECONDS:.0f} s; {way_out}"
            ) from None
        if run.returncode == 0 and output.is_file():
            return output.read_bytes()
    reason = _describe_failure(run)
    raise TokenizerConversionError(f"{folder / source} cannot be converted: {reason}; {way_out}")


def _describe_failure(run: subprocess.CompletedProcess[bytes]) -> str:
    """Return why a conversion failed; only a program that ended by itself wrote the reason."""
    if run.returncode < 0:
        try:
            return f"the process was ended by {signal.Signals(-run.returncode).name}"
        except ValueError:
            return f"the process was ended by signal {-run.returncode}"
    lines = run.stderr.decode(errors="replace").strip().splitlines()
    if run.returncode == 1 and lines:
        return lines[-1][:500]
    return f"the process ended with status {run.returncode}"
