# SPDX-License-Identifier: Apache-2.0
"""Tokenizers in other formats than tokenizer.json are converted once, with the token ids of Transformers."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import regex
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers, trainers

from mizzen.common import tokenizer_json
from mizzen.common.tokenizer_json import TokenizerConversionError, read_tokenizer_json
from mizzen.engine import convert_tokenizer
from mizzen.engine.grammar.vocabulary import byte_alphabet, read_vocabulary
from mizzen.gateway.text.tokenizer import Tokenizer, TokenizerError
from mizzen.server.model_files import read_model_files

CORPUS = [
    "The ship has three masts: fore, main and mizzen. It's 1,024 tonnes; isn't it?",
    "Ein Schiff mit drei Masten: Fock-, Groß- und Besanmast. Çà et là, œuvre naïve.",
    "def add(a, b):\n    return a + b\n\n\tprint(add(1, 2))  # stop here\r\n",
] * 8
PARTS = [
    *("ship", " the", "mast", "  ", " ", "\n", "\t", "<s>", "<|im_start|>", "</s>", "ß", "é", "e\u0301"),
    *("🙂", "世界", "▁", "\u200d", "<0x41>", "Groß", "1,024", "\r\n", "\u00a0", "ﬁ"),
]
TEXTS = st.lists(st.sampled_from(PARTS) | st.text(st.characters(codec="utf-8"), max_size=4), max_size=12).map(
    "".join
) | st.sampled_from(CORPUS)
PATTERN = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPECIAL = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
FIRST = len(SPECIAL) + 3
"""Id of the first token that is not special; `tekken.json` reserves more ids than it lists."""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache/tokenizers"


def sentencepiece_folder(folder: Path, kind: str) -> Path:
    """Train a model with SentencePiece, and write a folder like those of Llama 2 and Mistral 7B."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=420,
        model_type=kind,
        byte_fallback=True,
        user_defined_symbols=["<|im_start|>"],
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    configuration = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, **special}
    (folder / "tokenizer_config.json").write_text(json.dumps(configuration))
    return folder


def tekken_folder(folder: Path) -> Path:
    """Train byte-level BPE, and write it as Mistral's `tekken.json`."""
    trained = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(PATTERN), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trained.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    alphabet = byte_level.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    trained.train_from_iterator(CORPUS, trainer)
    values = byte_alphabet()
    merged = sorted((index, token) for token, index in trained.get_vocab().items() if len(token) > 1)
    tokens = [bytes([value]) for value in range(256)]
    tokens += [bytes(values[character] for character in token) for _, token in merged]
    content = {
        "config": {
            "pattern": PATTERN,
            "default_vocab_size": len(tokens) + FIRST - 2,  # the last two tokens of the vocabulary are unused
            "default_num_special_tokens": FIRST,
            "version": "v7",
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
        "special_tokens": [
            {"rank": rank, "token_str": token, "is_control": True} for rank, token in enumerate(SPECIAL)
        ],
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def tekken_ids(folder: Path, text: str) -> list[int]:
    """Return the ids of a text without special tokens: in each piece, merge the pair of lowest rank."""
    content = json.loads((folder / "tekken.json").read_text())
    kept = content["vocab"][: content["config"]["default_vocab_size"] - FIRST]
    ranks = {base64.b64decode(entry["token_bytes"]): entry["rank"] for entry in kept}
    ids: list[int] = []
    for piece in regex.findall(PATTERN, text):
        parts = [bytes([value]) for value in piece.encode()]
        while True:
            pairs = [(ranks.get(parts[at] + parts[at + 1]), at) for at in range(len(parts) - 1)]
            known = [(rank, at) for rank, at in pairs if rank is not None]
            if not known:
                break
            at = min(known)[1]
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        ids += [FIRST + ranks[part] for part in parts]
    return ids


@pytest.fixture(scope="module", params=["bpe", "unigram"])
def sentencepiece_model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the converted tokenizer of a folder with `tokenizer.model`, and Transformers' own."""
    folder = sentencepiece_folder(tmp_path_factory.mktemp(request.param), request.param)
    from transformers import AutoTokenizer

    converted = convert_tokenizer.convert_sentencepiece(folder).encode()
    return Tokenizer.from_files({"tokenizer.json": converted}), AutoTokenizer.from_pretrained(str(folder))


@settings(max_examples=150)
@given(text=TEXTS)
def test_ids_equal_those_of_transformers(sentencepiece_model: Any, text: str) -> None:
    own, reference = sentencepiece_model
    for special in (True, False):
        ids = own.encode(text, add_special_tokens=special)
        assert ids == reference(text, add_special_tokens=special).input_ids
        assert own.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_sentencepiece_keeps_all_characters(sentencepiece_model: Any) -> None:
    own, _ = sentencepiece_model
    for text in (*CORPUS[:3], "größe 😀 世界", "a\n\n  b", "x \u0000y"):
        assert own.decode(own.encode(text)) == text


@pytest.fixture(scope="module")
def tekken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    folder = tekken_folder(tmp_path_factory.mktemp("tekken"))
    return folder, Tokenizer.from_files({"tokenizer.json": convert_tokenizer.convert_tekken(folder).encode()})


@settings(max_examples=150)
@given(text=TEXTS.filter(lambda text: not any(token in text for token in SPECIAL)))
def test_ids_of_tekken_follow_its_ranks(tekken: tuple[Path, Tokenizer], text: str) -> None:
    folder, own = tekken
    assert own.encode(text, add_special_tokens=False) == tekken_ids(folder, text)
    assert own.encode(text) == [SPECIAL.index("<s>"), *tekken_ids(folder, text)]
    assert own.decode(own.encode(text)) == text


def test_special_tokens_of_tekken_have_the_first_ids(tekken: tuple[Path, Tokenizer]) -> None:
    _, own = tekken
    assert [own.special_token_id(token) for token in SPECIAL] == [*range(len(SPECIAL))]
    assert own.encode("[INST]a[/INST]", add_special_tokens=False) == [3, FIRST + ord("a"), 4]


@pytest.mark.parametrize("version", ["v3", "v7"])
def test_old_tekken_files_need_not_list_their_special_tokens(tmp_path: Path, version: str) -> None:
    """Mistral's library gives the first ids to the same tokens, and names the others by their ids."""
    path = tekken_folder(tmp_path) / "tekken.json"
    content = json.loads(path.read_text())
    del content["special_tokens"]
    content["config"] |= {"version": version, "default_num_special_tokens": 1000}
    content["config"]["default_vocab_size"] += 1000 - FIRST
    path.write_text(json.dumps(content))
    own = Tokenizer.load(tmp_path)
    tokens = ("<unk>", "[TOOL_CALLS]", "<pad>", "[SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>")
    assert [own.special_token_id(token) for token in tokens] == [0, 9, 11, 17, 19, 20]
    assert own.encode("[INST]a[/INST]") == [1, 3, 1000 + ord("a"), 4]
    content["config"]["version"] = "v11"
    path.write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="its version is v11, and it does not list its special tokens"):
        Tokenizer.load(tmp_path)


def test_folder_is_converted_once_for_all_readers(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tekken_folder(tmp_path)
    files = read_model_files(folder)
    assert [path.read_bytes() for path in cache.iterdir()] == [files["tokenizer.json"]]
    monkeypatch.setattr(subprocess, "run", None)
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("The ship") == [1, *tekken_ids(folder, "The ship")]
    assert read_vocabulary(folder, tokenizer.vocab_size)[FIRST + ord("a")] == b"a"
    assert not (folder / "tokenizer.json").exists()


def test_file_without_special_tokens_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(b'{"config": {}, "vocab": []}')
    with pytest.raises(TokenizerError, match=r"does not list its special tokens.*save_pretrained") as caught:
        Tokenizer.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(convert_tokenizer, "is_installed", lambda name: name != "sentencepiece")
    with pytest.raises(SystemExit, match=r"pip install 'mizzen\[worker\]' \(sentencepiece\)"):
        convert_tokenizer.main(str(tmp_path), "tokenizer.model", str(tmp_path / "out"))


def test_conversion_knows_no_secrets(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(b"{}")
    environments: list[dict[str, str]] = []

    def run(command: list[str], *, env: dict[str, str], **options: Any) -> subprocess.CompletedProcess[bytes]:
        environments.append(env)
        return subprocess.CompletedProcess(command, 1, b"", b"no")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("DATABASE_URL", "s3cret")
    monkeypatch.setenv("HOME", "/s3cret")
    with pytest.raises(TokenizerConversionError, match="cannot be converted: no; save"):
        read_tokenizer_json(tmp_path)
    assert "s3cret" not in str(environments[0])
    assert "PATH" in environments[0]


def test_modules_in_the_current_folder_are_not_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    folder = tekken_folder(tmp_path)
    for name in ("json.py", "sentencepiece.py", "transformers.py"):
        (folder / name).write_text("open('was_run', 'w')\n")
    monkeypatch.chdir(folder)
    assert read_tokenizer_json(Path()) is not None
    assert not (folder / "was_run").exists()
    assert [path.stat().st_mode & 0o777 for path in cache.iterdir()] == [0o644]


def test_process_that_is_ended_by_a_signal_names_the_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "tekken.json").write_bytes(b"{}")
    ended = subprocess.CompletedProcess([], -9, b"", b"a warning of a library")
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ended)
    with pytest.raises(TokenizerConversionError, match="converted: the process was ended by SIGKILL; save"):
        read_tokenizer_json(tmp_path)


def test_large_and_unreadable_files_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(b"{}")
    monkeypatch.setattr(tokenizer_json, "MAX_FILE_BYTES", 1)
    with pytest.raises(TokenizerConversionError, match=r"tekken.json has 2 bytes; at most 1"):
        read_tokenizer_json(tmp_path)
    monkeypatch.undo()
    monkeypatch.setattr(tokenizer_json.sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(TokenizerConversionError, match=r"cannot be converted: .*missing"):
        read_tokenizer_json(tmp_path)


def test_limits_end_a_conversion_that_needs_much_memory() -> None:
    program = "from mizzen.engine import convert_tokenizer as c; c.limit_resources(); bytearray(9 << 30)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "MemoryError" in run.stderr


def test_result_depends_on_the_version_of_transformers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cache: Path
) -> None:
    (tmp_path / "tekken.json").write_bytes(b"{}")
    monkeypatch.setattr(tokenizer_json, "_convert", lambda folder, source: b"{}")
    for version in ("1", "2"):
        monkeypatch.setattr(tokenizer_json, "_transformers_version", lambda version=version: version)
        read_tokenizer_json(tmp_path)
    assert len(list(cache.iterdir())) == 2


def test_slow_conversion_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(b"{}")
    monkeypatch.setattr(tokenizer_json, "SECONDS", 0.01)
    with pytest.raises(TokenizerConversionError, match="took more than"):
        read_tokenizer_json(tmp_path)


def test_cache_that_is_not_writable_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "file"))
    (tmp_path / "tekken.json").write_bytes(b"{}")
    monkeypatch.setattr(tokenizer_json, "_convert", lambda folder, source: b"{}")
    assert read_tokenizer_json(tmp_path) == b"{}"
    assert read_tokenizer_json(tmp_path / "missing") is None
