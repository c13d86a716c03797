# SPDX-License-Identifier: Apache-2.0
"""Train the demo model from scratch on `scripts/demo_data/` and write it to `models/demo/`.

    python scripts/train_demo.py

A Llama with 1.45 million parameters memorizes a few hundred short answers. The cross-entropy loss counts only
the tokens of answers. Each question is trained alone, after earlier turns, with a system message, and as
plain text, so that the model answers it in each of these forms. Finally the script verifies all answers with
greedy decoding, and saves nothing if a token is wrong or its logit margin is below `MARGIN`.

One thread and a fixed seed make a run reproducible on one machine. A run takes about 15 minutes of one core.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "scripts/demo_data"
FILES = ROOT / "scripts/demo_model"
VOCABULARY = 1024
CONTEXT = 2048
MARGIN = 0.5
"""Minimum margin of a correct token's logit over all other logits: large enough that no batch shape or kernel
changes the token."""
CONSOLIDATIONS = 10
MAX_BYTES = 3_000_000
SPECIAL = tuple(f"<|{name}|>" for name in ("bos", "pad", "system", "user", "assistant", "end"))
BOS, PAD, SYSTEM, USER, ASSISTANT, END = SPECIAL
SYSTEM_MESSAGES = (
    "You are a helpful assistant.",
    "You are the demo model of Mizzen.",
    "Answer briefly.",
    "Be friendly and exact.",
)
IGNORED = -100


@dataclass(frozen=True)
class Example:
    """Token ids of a conversation, and for each token whether the loss counts it."""

    ids: list[int]
    learn: list[bool]


def read_data() -> list[tuple[str, str]]:
    """Return (question, answer) pairs from `DATA`, one pair for each phrasing of a question."""
    pairs = []
    for path in sorted(DATA.glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            entry = json.loads(line)
            pairs += [(question, entry["answer"]) for question in entry["questions"]]
    questions = [question for question, _ in pairs]
    repeated = {question for question in questions if questions.count(question) > 1}
    if repeated:
        raise SystemExit(f"questions with several answers: {sorted(repeated)}")
    return pairs


def train_tokenizer(pairs: list[tuple[str, str]]) -> Tokenizer:
    """Train a byte-level BPE tokenizer on all texts; the special tokens get the lowest ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for pair in pairs for text in pair], trainer)
    bos = tokenizer.token_to_id(BOS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, bos)]
    )
    return tokenizer


class Formatter:
    """Encodes conversations as token ids, in the same form as the chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.special = {name: tokenizer.token_to_id(name) for name in SPECIAL}

    def text(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def chat(self, turns: list[tuple[str, str]], system: str | None = None) -> Example:
        """Return a conversation of (question, answer) turns as an example; the loss counts the answers."""
        ids, learn = [self.special[BOS]], [False]

        def add(tokens: list[int], counts: bool) -> None:
            ids.extend(tokens)
            learn.extend([counts] * len(tokens))

        if system is not None:
            add([self.special[SYSTEM], *self.text(system), self.special[END]], False)
        for question, answer in turns:
            add([self.special[USER], *self.text(question), self.special[END]], False)
            add([self.special[ASSISTANT]], False)
            add([*self.text(answer), self.special[END]], True)
        return Example(ids, learn)

    def plain(self, question: str, answer: str) -> Example:
        """Return a question and its answer as an example in plain text, without the chat template."""
        prompt = [self.special[BOS], *self.text(f"Question: {question}\nAnswer:")]
        reply = [*self.text(f" {answer}"), self.special[END]]
        return Example(prompt + reply, [False] * len(prompt) + [True] * len(reply))


def sloppy(question: str, random_: random.Random) -> str:
    """Return a question as a user may type it: perhaps in lower case, perhaps without final punctuation."""
    if random_.random() < 0.1:
        question = question.lower()
    if random_.random() < 0.1:
        question = question.rstrip("?.!")
    return question


def conversations(
    pairs: list[tuple[str, str]], formatter: Formatter, random_: random.Random
) -> Iterator[Example]:
    """Yield examples in which each pair occurs once: as plain text, or as one of 1 to 3 turns of a chat."""
    rest = random_.sample(pairs, len(pairs))
    while rest:
        if random_.random() < 0.25:
            yield formatter.plain(*rest.pop())
            continue
        system = random_.choice(SYSTEM_MESSAGES) if random_.random() < 0.25 else None
        turns = [rest.pop() for _ in range(min(len(rest), random_.choice((1, 1, 2, 2, 3))))]
        yield formatter.chat([(sloppy(q, random_), a) for q, a in turns], system)


def tensors(examples: list[Example], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (ids, labels) of examples, each int64 [examples, longest example].

    Rows are padded on the right, which causal attention ignores; tokens without loss get the label `IGNORED`.
    """
    longest = max(len(example.ids) for example in examples)
    ids = torch.full((len(examples), longest), pad)
    labels = torch.full((len(examples), longest), IGNORED)
    for row, example in enumerate(examples):
        n = len(example.ids)
        ids[row, :n] = torch.tensor(example.ids)
        labels[row, :n] = torch.where(torch.tensor(example.learn), ids[row, :n], IGNORED)
    return ids, labels


def batches(
    examples: list[Example], pad: int, tokens: int, random_: random.Random
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return (ids, labels) batches of similarly long examples, in random order; `tokens` limits each."""
    groups: list[list[Example]] = [[]]
    for example in sorted(examples, key=lambda e: (len(e.ids), e.ids)):
        if groups[-1] and (len(groups[-1]) + 1) * len(example.ids) > tokens:
            groups.append([])
        groups[-1].append(example)
    random_.shuffle(groups)
    return [tensors(group, pad) for group in groups]


def make_model(special: dict[str, int]) -> LlamaForCausalLM:
    """Return the model with random weights; `special` contains the ids of the special tokens."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=288,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=special[BOS],
        eos_token_id=special[END],
        pad_token_id=special[PAD],
        use_cache=True,
    )
    return LlamaForCausalLM(config)


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the counted tokens; only their logits are computed."""
    hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    counted = labels[:, 1:] != IGNORED
    return F.cross_entropy(model.lm_head(hidden[counted]), labels[:, 1:][counted])


def train(
    model: LlamaForCausalLM,
    pairs: list[tuple[str, str]],
    formatter: Formatter,
    arguments: argparse.Namespace,
) -> None:
    """Train a model with AdamW (Loshchilov and Hutter) and a cosine learning-rate schedule with warm-up."""
    random_ = random.Random(arguments.seed)
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}],
        lr=arguments.learning_rate,
        betas=(0.9, 0.97),
    )
    began = time.monotonic()
    for epoch in range(arguments.epochs):
        examples = list(conversations(pairs, formatter, random_))
        parts = batches(examples, formatter.special[PAD], arguments.batch_tokens, random_)
        total = 0.0
        for index, (ids, labels) in enumerate(parts):
            progress = (epoch + index / len(parts)) / arguments.epochs
            warm = min(1.0, (epoch * len(parts) + index + 1) / 60)
            scale = warm * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
            for group in optimizer.param_groups:
                group["lr"] = arguments.learning_rate * scale
            loss = loss_of(model, ids, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            total += loss.item()
        seconds = time.monotonic() - began
        print(f"epoch {epoch + 1}: loss {total / len(parts):.4f}, {seconds:.0f} s", flush=True)
        if arguments.checkpoint and (epoch + 1) % 5 == 0:
            save(model, formatter, arguments.checkpoint)


@torch.inference_mode()
def margins(model: LlamaForCausalLM, examples: list[Example], pad: int) -> list[float]:
    """Return, for each example, the smallest margin of a correct token's logit over all other logits.

    One forward pass suffices: greedy decoding yields the same tokens as long as each of them is the argmax.
    """
    result = [math.inf] * len(examples)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].ids))
    for start in range(0, len(order), 32):
        rows = order[start : start + 32]
        ids, labels = tensors([examples[row] for row in rows], pad)
        hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
        counted, targets = labels[:, 1:] != IGNORED, labels[:, 1:]
        logits = model.lm_head(hidden[counted]).float()
        correct = logits.gather(1, targets[counted][:, None])[:, 0]
        leads = correct - logits.scatter(1, targets[counted][:, None], -math.inf).amax(1)
        for row, lead in zip(rows, leads.split(counted.sum(1).tolist()), strict=True):
            result[row] = lead.min().item()
    return result


def examples_by_form(pairs: list[tuple[str, str]], formatter: Formatter) -> dict[str, list[Example]]:
    """Return the examples that `verify` checks, by the form in which they contain the question.

    Each example counts only its last answer, and each form contains every pair.
    """

    def after(previous: tuple[str, str], pair: tuple[str, str]) -> Example:
        example = formatter.chat([previous, pair])
        last = len(formatter.text(pair[1])) + 1
        return Example(example.ids, [False] * (len(example.ids) - last) + [True] * last)

    return {
        "alone": [formatter.chat([pair]) for pair in pairs],
        "after a system message": [formatter.chat([pair], SYSTEM_MESSAGES[0]) for pair in pairs],
        "as plain text": [formatter.plain(*pair) for pair in pairs],
        "after another turn": [after(pairs[i - 1], pair) for i, pair in enumerate(pairs)],
    }


def verify(model: LlamaForCausalLM, forms: dict[str, list[Example]], pad: int) -> bool:
    """Return whether greedy decoding yields every answer, and print the number of wrong answers.

    In float32, each token's logit must also have a margin above `MARGIN`.
    """
    good = True
    for dtype, limit in ((torch.float32, MARGIN), (torch.bfloat16, 0.0)):
        model.to(dtype)
        for name, examples in forms.items():
            smallest = margins(model, examples, pad)
            wrong = sum(margin <= 0 for margin in smallest)
            print(f"{name}, {dtype}: {wrong} of {len(examples)} wrong, smallest margin {min(smallest):.2f}")
            good = good and min(smallest) > limit
    return good


def consolidate(
    model: LlamaForCausalLM, forms: dict[str, list[Example]], pad: int, arguments: argparse.Namespace
) -> None:
    """Train until every answer has a logit margin of at least 2 * `MARGIN`, or for `CONSOLIDATIONS` rounds.

    Each round trains on the answers with a smaller margin, mixed with random other examples. The learning
    rate is a tenth of `--learning-rate`.
    """
    random_ = random.Random(arguments.seed)
    examples = [example for form in forms.values() for example in form]
    optimizer = torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate / 10, weight_decay=0.0)
    for round_ in range(CONSOLIDATIONS):
        smallest = margins(model, examples, pad)
        weak = [example for example, margin in zip(examples, smallest, strict=True) if margin < 2 * MARGIN]
        print(f"consolidation {round_}: {len(weak)} weak answers", flush=True)
        if not weak:
            return
        mixed = weak * 4 + random_.sample(examples, 600)
        for ids, labels in batches(mixed, pad, arguments.batch_tokens, random_):
            loss_of(model, ids, labels).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def save(model: LlamaForCausalLM, formatter: Formatter, folder: Path) -> None:
    """Write bfloat16 weights, configuration and tokenizer to a folder; the model itself stays unchanged."""
    folder.mkdir(parents=True, exist_ok=True)
    rounded = LlamaForCausalLM(model.config)
    rounded.load_state_dict(model.state_dict())
    special = formatter.special
    rounded.generation_config = GenerationConfig(
        bos_token_id=special[BOS], eos_token_id=special[END], pad_token_id=special[PAD]
    )
    rounded.to(torch.bfloat16).save_pretrained(folder)
    formatter._tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": END,
        "pad_token": PAD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    for path in FILES.iterdir():
        shutil.copyfile(path, folder / path.name)
    weights = folder / "model.safetensors"
    weights.chmod(0o644)
    size = weights.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"the weights take {size} bytes; at most {MAX_BYTES} are allowed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--output", type=Path, default=ROOT / "models/demo", help="output folder of the model"
    )
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--batch-tokens", type=int, default=2048, help="tokens per training step")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--checkpoint", type=Path, help="folder in which the unverified model is saved every 5 epochs"
    )
    parser.add_argument("--resume", type=Path, help="folder of a checkpoint to consolidate, without training")
    arguments = parser.parse_args()

    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    pairs = read_data()
    formatter = Formatter(train_tokenizer(pairs))
    model = make_model(formatter.special)
    parameters = sum(p.numel() for p in model.parameters())
    tokens = sum(len(formatter.chat([pair]).ids) for pair in pairs)
    print(f"{len(pairs)} questions, {tokens} tokens, {parameters} parameters", flush=True)
    if arguments.resume:
        model.load_state_dict(LlamaForCausalLM.from_pretrained(arguments.resume).state_dict())
    else:
        train(model, pairs, formatter, arguments)
    model.to(torch.bfloat16).float()  # round, so that a run resumed from a checkpoint continues identically
    forms = examples_by_form(pairs, formatter)
    consolidate(model, forms, formatter.special[PAD], arguments)
    model.eval().to(torch.bfloat16)  # from now on, the weights equal the saved ones
    if not verify(model, forms, formatter.special[PAD]):
        print("the model has not learned its answers and is not saved", file=sys.stderr)
        return 1
    save(model, formatter, arguments.output)
    print(f"saved to {arguments.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
