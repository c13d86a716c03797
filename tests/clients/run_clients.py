# SPDX-License-Identifier: Apache-2.0
"""Run real clients that the test environment does not install against `mizzen serve`.

Usage: run_clients.py BIN, where BIN is the folder with the programs of an environment with the packages in
requirements.txt. `make client-tests` creates it.

- lm-evaluation-harness runs two multiple-choice tasks with `local-completions` and the server's tokenizer.
  Its log-likelihoods have to equal Transformers'. If its prompts have long prefixes in common, the
  engine has to compute at most a third of their tokens.
- litellm chats, streams, completes, embeds, ranks documents as three of its providers do, and calls the
  Messages API.
- sentence-transformers saves tiny models of each architecture and computes their vectors and scores, which
  Mizzen's have to equal.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from sentence_vectors import check_sentence_transformers

from demo_model import score_continuation, training_entries
from encoders.twins import save_encoder, save_wordpiece

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models/demo"
OFFLINE = {
    "HF_DATASETS_OFFLINE": "1", "HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}  # fmt: skip
LETTERS = "ABCD"
QUESTIONS = 12
LISTED = "".join(f"{letter}. {{{{choices[{index}]}}}}\n" for index, letter in enumerate(LETTERS))
TASKS: dict[str, tuple[str, str | list[str], int]] = {
    "answers": ("Question: {{question}}\nAnswer:", "choices", 2),
    "letters": (f"{{{{question}}}}\n{LISTED}Answer:", [*LETTERS], 3),
}
"""Tasks: the prompt's template, the choices, and the number of worked examples."""
BATCH_SIZE = 1  # the default of the harness
MAX_COMPUTED = 1 / 3
"""Maximum share of the prompt tokens of the task `letters` that the engine computes."""
TOLERANCE = 1e-3
"""Maximum difference of a log-likelihood from that of Transformers."""


@contextmanager
def serve(model: str, *options: str) -> Iterator[str]:
    """Run `mizzen serve` and yield its URL, which ends with /v1."""
    command = [sys.executable, "-m", "mizzen.cli", "serve", model, "--port=0", "--api-metrics", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            found = next(filter(None, (re.search(r"http://\S+", line) for line in process.stdout)), None)
            if found is None:
                raise RuntimeError(f"mizzen serve {model} ended before it served")
            yield found[0].rstrip("/").removesuffix("/v1") + "/v1"
        finally:
            process.terminate()


def write_tasks(folder: Path) -> None:
    """Write the tasks of lm-evaluation-harness, with questions from the demo model's training data."""
    entries, rows = training_entries(), []
    for index, entry in enumerate(entries[:QUESTIONS]):
        right = index % len(LETTERS)
        others = [(index + 7 * (place - right)) % len(entries) for place in range(len(LETTERS))]
        choices = [entries[other]["answer"] for other in others]
        rows.append({"question": entry["questions"][0], "choices": choices, "answer": right})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, (prompt, choices, examples) in TASKS.items():
        task = {
            "task": name, "dataset_path": "json", "output_type": "multiple_choice",
            "dataset_kwargs": {"data_files": {"test": str(folder / "rows.jsonl")}},
            "test_split": "test", "fewshot_split": "test", "fewshot_config": {"sampler": "first_n"},
            "num_fewshot": examples, "doc_to_text": prompt,
            "doc_to_target": "answer", "doc_to_choice": choices,
            "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
        }  # fmt: skip
        (folder / f"{name}.yaml").write_text(json.dumps(task))


def run_task(tools: Path, url: str, folder: Path, name: str) -> list[dict[str, Any]]:
    """Run a task with the server's tokenizer, and return its samples."""
    model = f"model=demo,base_url={url}/completions,tokenizer_backend=remote,max_length=2048"
    command = [tools / "lm_eval", "run", "--model=local-completions", "--model_args", model, "--tasks", name]
    command += ["--include_path", folder, "--batch_size", str(BATCH_SIZE)]
    command += ["--log_samples", "--output_path", folder / "out"]
    environment = {**os.environ, **OFFLINE, "HF_HOME": str(folder / "hub")}
    environment.pop("PYTHONPATH", None)
    subprocess.run(command, env=environment, check=True, timeout=600, stderr=subprocess.DEVNULL)
    (path,) = (folder / "out").rglob(f"samples_{name}_*.jsonl")
    return [json.loads(line) for line in path.open()]


def compare(samples: list[dict[str, Any]]) -> float:
    """Return the largest difference of a log-likelihood from that of Transformers.

    Raises:
        AssertionError: whether a continuation is the most probable one differs.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO, dtype=torch.float32).eval()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(DEMO / "tokenizer.json"))
    worst = 0.0
    for sample in samples:
        for key, (answer, *_) in zip(sorted(sample["arguments"]), sample["resps"], strict=True):
            context, continuation = (sample["arguments"][key][f"arg_{i}"] for i in range(2))
            ids = tokenizer.encode(context + continuation, add_special_tokens=False)
            start = len(tokenizer.encode(context, add_special_tokens=False))
            total, best = score_continuation(model, ids, start)
            worst = max(worst, abs(total - float(answer[0])))
            assert str(best) == str(answer[1]), (key, context, continuation)
    return worst


def count_tokens(url: str) -> tuple[float, float]:
    """Return the numbers of prompt tokens so far, and how many came from the prefix cache."""
    metrics = httpx.get(f"{url.removesuffix('/v1')}/metrics").text
    found = [
        re.search(rf'^mizzen_gateway_{name}_total{{model="demo"}} (\S+)', metrics, re.MULTILINE)
        for name in ("prompt_tokens", "cached_prompt_tokens")
    ]
    prompt, cached = (float(match[1]) if match else 0.0 for match in found)
    return prompt, cached


def check_lm_eval(tools: Path, url: str, folder: Path) -> None:
    """Run the tasks, and check their log-likelihoods and the number of computed prompt tokens."""
    write_tasks(folder)
    for name in TASKS:
        before = count_tokens(url)
        difference = compare(run_task(tools, url, folder, name))
        prompt, cached = (now - then for now, then in zip(count_tokens(url), before, strict=True))
        share = (prompt - cached) / prompt
        print(
            f"lm-eval, {name}: log-likelihoods differ by {difference:.1e} at most from Transformers';",
            end=" ",
        )
        print(f"{prompt - cached:.0f} of {prompt:.0f} prompt tokens computed ({share:.0%})")
        assert difference <= TOLERANCE
        assert name != "letters" or share <= MAX_COMPUTED


def save_reranker(folder: Path) -> None:
    """Save a tiny cross-encoder with random weights."""
    save_encoder(folder, "Bert", "ForSequenceClassification", num_labels=1)
    save_wordpiece(folder)


def check_litellm(tools: Path, chat: str, reranker: str) -> None:
    """Call both models with litellm, and check what it returns."""
    command = [tools / "python", Path(__file__).with_name("litellm_calls.py"), chat, reranker]
    environment = {**os.environ, **OFFLINE}
    environment.pop("PYTHONPATH", None)
    output = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True).stdout
    report = json.loads(output.splitlines()[-1])
    assert report["chat"] == report["stream"] == report["message"]
    assert report["chat"].startswith("Mizzen serves language models on Kubernetes.")
    assert report["completion"]
    assert report["vectors"] == [192, 192]
    first, *others = report["ranked"].values()
    scores = [score for _, score in first]
    assert sorted(index for index, _ in first) == [0, 1, 2]
    assert scores == sorted(scores, reverse=True)
    for other in others:
        assert [index for index, _ in other] == [index for index, _ in first], report
        assert all(abs(score - best) < TOLERANCE for (_, score), (_, best) in zip(other, first, strict=True))
    print(f"litellm: {', '.join(report)} as expected")


def add_packages(tools: Path) -> None:
    """Make the packages of an environment importable here, where this environment does not have them."""
    (packages,) = (tools.parent / "lib").glob("python*/site-packages")
    sys.path.append(str(packages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("tools", type=Path, help="folder with lm_eval and the Python that has litellm")
    tools = parser.parse_args().tools.absolute()
    with tempfile.TemporaryDirectory() as folder, serve("demo", "--tokenizer-info") as chat:
        check_lm_eval(tools, chat, Path(folder))
        reranker_folder = Path(folder) / "reranker"
        reranker_folder.mkdir()
        save_reranker(reranker_folder)
        with serve(str(reranker_folder), "--served-name=reranker") as reranker:
            check_litellm(tools, chat, reranker)
    add_packages(tools)
    check_sentence_transformers(serve)


if __name__ == "__main__":
    main()
