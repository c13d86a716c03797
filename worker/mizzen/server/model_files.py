# SPDX-License-Identifier: Apache-2.0
"""Read the tokenizer and configuration files of a model folder, and hash them.

An engine serves these files to gateways, which therefore tokenize and render templates without a model
volume.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from mizzen.common.sentence_transformers import POOLING_FILE
from mizzen.common.tokenizer_json import FILE as TOKENIZER
from mizzen.common.tokenizer_json import MAX_FILE_BYTES, TokenizerConversionError, read_tokenizer_json
from mizzen.weights.checkpoint_files import WEIGHTS_ADVICE, describe_gguf

TEXT_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    POOLING_FILE,
)
"""Files that determine tokenization, chat templates and the pooling of embedding models."""
OTHER_FILES = (
    "config.json",
    "generation_config.json",
    "config_sentence_transformers.json",
    "preprocessor_config.json",
)
"""Files that gateways may fetch, but that do not influence tokenization."""
TEMPLATE_FOLDER = "additional_chat_templates"


class ModelFolderError(ValueError):
    """Raised if a model folder cannot be served; the message names the folder or the file."""


def check_is_folder(folder: Path) -> None:
    """Check that the folder of `--model` exists.

    Raises:
        ModelFolderError: it does not exist, or is not a folder.
    """
    if not folder.is_dir():
        raise ModelFolderError(
            f"--model {folder} is not a folder where the engine runs, in its image or a volume; "
            f"{WEIGHTS_ADVICE}"
        )


def check_has_config(folder: Path) -> None:
    """Check that a model folder has a config.json.

    Raises:
        ModelFolderError: it has none; the message says whether the folder has a model in the GGUF format.
    """
    if (folder / "config.json").is_file():
        return
    gguf = next(folder.glob("*.gguf"), None)
    raise ModelFolderError(
        f"--model: {describe_gguf(str(gguf))}"
        if gguf
        else f"--model {folder} has no config.json; {WEIGHTS_ADVICE}"
    )


def read_tokenizer(folder: Path) -> bytes | None:
    """Return a model's `tokenizer.json`, converted if necessary; None if the folder has no tokenizer.

    Raises:
        ModelFolderError: the tokenizer cannot be converted.
        OSError: the file `tokenizer.json` cannot be read.
    """
    try:
        return read_tokenizer_json(folder)
    except TokenizerConversionError as error:
        raise ModelFolderError(f"--model: {error}") from error


def read_model_files(folder: Path) -> dict[str, bytes]:
    """Return the tokenizer and configuration files of a model folder, by name.

    If the folder has its tokenizer in another format than `tokenizer.json`, the result has it in both.

    Raises:
        ModelFolderError: the folder is missing, a file is too large or unreadable, or the tokenizer cannot be
            converted.
    """
    check_is_folder(folder)
    names = [*TEXT_FILES, *OTHER_FILES]
    names += sorted(f"{TEMPLATE_FOLDER}/{path.name}" for path in (folder / TEMPLATE_FOLDER).glob("*.jinja"))
    files: dict[str, bytes] = {}
    for name in names:
        path = folder / name
        if not path.is_file():
            continue
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise ModelFolderError(f"{path} has {size} bytes; at most {MAX_FILE_BYTES} are served")
        try:
            files[name] = path.read_bytes()
        except OSError as error:
            raise ModelFolderError(f"cannot read {path}: {error.strerror}") from error
    if TOKENIZER not in files:
        converted = read_tokenizer(folder)
        if converted is not None:
            files[TOKENIZER] = converted
    return files


def tokenizer_hash(files: dict[str, bytes]) -> str:
    """Return the SHA-256, in hexadecimal, of the files except `OTHER_FILES`."""
    digest = hashlib.sha256()
    for name in sorted(files):
        if name in OTHER_FILES:
            continue
        digest.update(len(name).to_bytes(8, "little") + name.encode())
        digest.update(len(files[name]).to_bytes(8, "little") + files[name])
    return digest.hexdigest()
