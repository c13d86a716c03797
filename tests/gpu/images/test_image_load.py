# SPDX-License-Identifier: Apache-2.0
"""Images under load on a GPU: aborts, kernels that are compiled too late, and the memory of large images."""

from __future__ import annotations

import io
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from common_parts.vision_shapes import VISION_SHAPES
from gpu_twins import largest_embeddings, make_prompts, read_rules, save_gpu_twin
from hopper import FA3_FAULT
from msgspec.structs import replace
from PIL import Image

from mizzen import LLM, ImagePrompt, SamplingParams
from mizzen.core.request import FinishReason, Request
from mizzen.core.step_plan import StepPlan
from mizzen.engine.engine import Engine
from mizzen.engine.execution.forward_batch import BatchLayout
from mizzen.engine.execution.prefill_graphs import PrefillGraphs
from mizzen.engine.images.pending import ImageFile
from mizzen.images.types import ImageRules
from mizzen.offline.image_prompts import PreparedImages, prepare_images

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MIB = 1 << 20
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SMALL: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "skip_tokenizer": True,
    "kv_cache_tokens": 8192,
    "prefill_chunk_tokens": 64,
    "max_running_requests": 8,
}


def as_request(rid: int, prepared: PreparedImages, sampling: SamplingParams = GREEDY) -> Request:
    """Return the request of a prompt."""
    rotary = prepared.rotary
    return Request(
        rid=rid,
        prompt=prepared.ids,
        sampling=sampling,
        seed=rid,
        images=prepared.images,
        rotary=None if rotary is None else rotary.positions,
        rotary_offset=0 if rotary is None else rotary.offset,
    )


def run_step(engine: Engine, files: dict[bytes, ImageFile]) -> list[tuple[int, FinishReason]]:
    """Run a step, with the files of the images that it needs; return the requests that ended."""
    output = engine.step(time.monotonic())
    for missing in engine.drain_missing_images():
        for digest in missing.digests:
            engine.provide_image(replace(files[digest], rid=missing.rid))
    engine.drain_cache_events()
    ended = [*(output.finished if output else ()), *engine.drain_finished()]
    return [(end.rid, end.reason) for end in ended]


@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "llava-next"])
def test_aborted_requests_leave_nothing_behind(name: str, tmp_path: Path) -> None:
    save_gpu_twin(tmp_path, name)
    rules = read_rules(tmp_path)
    prompts = make_prompts(rules, name, 60)
    files = {digest: file for _, prepared in prompts for digest, file in prepared.files.items()}
    source = random.Random(name)
    with LLM(tmp_path, **SMALL, image_cache_tokens=largest_embeddings(rules), check_integrity=True) as llm:
        engine, live, reasons = llm.engine, set[int](), list[FinishReason]()
        for rid, (_, prepared) in enumerate(prompts):
            engine.submit(as_request(rid, prepared))
            live.add(rid)
            if source.random() < 0.3:
                engine.abort(source.choice(sorted(live)))
            for end, reason in run_step(engine, files):
                live.discard(end)
                reasons.append(reason)
        deadline = time.monotonic() + 60
        while live and time.monotonic() < deadline:
            for end, reason in run_step(engine, files):
                live.discard(end)
                reasons.append(reason)
        assert not live
        while engine.busy:
            run_step(engine, files)
        load = engine.load()
        assert (load.running, load.waiting, load.pages_used) == (0, 0, 0)
        assert engine.integrity_faults == 0
    assert {*reasons} == {FinishReason.LENGTH, FinishReason.ABORT}
    assert len(reasons) == len(prompts)


@pytest.mark.parametrize(
    ("name", "graph_tokens"),
    [("qwen2.5-vl", None), ("qwen3-vl", None), ("llava-siglip", None), ("mistral3", None), ("qwen3-vl", 16)],
)
def test_no_kernel_is_compiled_after_the_start(
    name: str, graph_tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with chunks that are larger than all graphs."""
    from triton import knobs

    from mizzen.kernels import nvrtc

    save_gpu_twin(tmp_path, name)
    prompts = make_prompts(read_rules(tmp_path), name, 16)
    compiled: list[str] = []

    def record(*args: Any, **fields: Any) -> None:
        compiled.append(str(fields.get("repr", args)))

    load_or_compile = nvrtc.load_or_compile_cubin

    def record_cubin(source: str, kernel: str, *how: Any) -> bytes:
        compiled.append(kernel)
        return load_or_compile(source, kernel, *how)

    sampled = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=12, ignore_eos=True)
    with LLM(tmp_path, **SMALL, cuda_graph_max_tokens=graph_tokens) as llm:
        monkeypatch.setattr(knobs.runtime, "jit_post_compile_hook", record)
        monkeypatch.setattr(nvrtc, "load_or_compile_cubin", record_cubin)
        llm.generate([prompt for prompt, _ in prompts], GREEDY)
        llm.generate([prompt for prompt, _ in prompts], sampled)
    assert compiled == []


@pytest.mark.skipif(FA3_FAULT is not None, reason=f"graphs need FlashAttention 3: {FA3_FAULT}")
@pytest.mark.parametrize("name", ["qwen2.5-vl", "qwen3-vl", "llava-siglip"])
def test_prompts_with_images_run_as_graphs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_gpu_twin(tmp_path, name)
    rules, sections = read_rules(tmp_path), name.startswith("qwen")
    replays: list[tuple[int, int, bool]] = []
    replay = PrefillGraphs.__call__

    def record(graphs: PrefillGraphs, plan: StepPlan, layout: BatchLayout, rows: Any) -> torch.Tensor:
        images = 0 if layout.image_rows is None else len(layout.image_rows)
        replays.append((len(layout.slots), images, layout.rotary is not None))
        return replay(graphs, plan, layout, rows)

    prompt = ImagePrompt([5, 6, rules.placeholder_id, *range(10, 130)], [noise_file(200, 160, 0)])
    with LLM(tmp_path, **SMALL) as llm:
        monkeypatch.setattr(PrefillGraphs, "__call__", record)
        llm.generate([prompt], GREEDY)
    assert sum(tokens - images for tokens, images, _ in replays) >= 122
    assert any(images for _, images, _ in replays)
    assert any(not images for _, images, _ in replays)
    assert all(rotary == sections for _, _, rotary in replays)


def noise_file(width: int, height: int, seed: int) -> bytes:
    """Return a JPEG file of coarse noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 16 + 1, width // 16 + 1, 3), np.uint8)
    output = io.BytesIO()
    Image.fromarray(noise).resize((width, height)).save(output, "JPEG", quality=80)
    return output.getvalue()


def save_shape(folder: Path, shape: str, layers: int) -> None:
    """Write a model folder with a real tower, and a text part with few layers."""
    described = VISION_SHAPES[shape]
    text = described.config.get("text_config", described.config)
    text = {**text, "num_hidden_layers": layers}
    config = {**described.config, "text_config": text} if "text_config" in described.config else text
    described.write(folder, config)


def image_request(
    rid: int, rules: ImageRules, width: int, height: int
) -> tuple[Request, dict[bytes, ImageFile]]:
    """Return a request with one image, and its file by digest."""
    ids = np.array([5, 6, rules.placeholder_id, 7], np.int32)
    prepared = prepare_images(ids, [noise_file(width, height, rid)], rules)
    return as_request(rid, prepared), dict(prepared.files)


@pytest.mark.parametrize("shape", ["qwen3-vl-8b", "qwen2.5-vl-7b"])
def test_large_images_fit_into_the_predicted_memory(shape: str, tmp_path: Path) -> None:
    """Images of all sizes, several of the largest at once, beside prompts of the largest chunk.

    The memory is that of this process, because other tests may use the GPU at the same time.
    """
    save_shape(tmp_path, shape, layers=6)
    rules = read_rules(tmp_path)
    draw = np.random.default_rng(0)
    with LLM(
        tmp_path,
        device="cuda",
        load_format="dummy",
        skip_tokenizer=True,
        kv_cache_tokens=100_000,
        context_length=20_000,
        max_running_requests=32,
        prefill_chunk_tokens=4096,
    ) as llm:
        engine, info = llm.engine, llm.engine.info
        before = torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        sizes = [(4096, 4096), (4000, 3200), (7000, 1800), (1800, 7000), (3600, 3600)]
        sizes += [(int(w), int(h)) for w, h in draw.integers(60, 2200, (24, 2))]
        files: dict[bytes, ImageFile] = {}
        for rid, (width, height) in enumerate(sizes):
            request, own = image_request(2 * rid, rules, width, height)
            files |= own
            engine.submit(request)
            prompt = draw.integers(3, 10_000, 6000).astype(np.int32)
            engine.submit(Request(rid=2 * rid + 1, prompt=prompt, sampling=GREEDY, seed=rid))
        ended: list[FinishReason] = []
        deadline = time.monotonic() + 120
        while len(ended) < 2 * len(sizes) and time.monotonic() < deadline:
            ended += [reason for _, reason in run_step(engine, files)]
        assert ended == [FinishReason.LENGTH] * (2 * len(sizes))
        grown = torch.cuda.max_memory_reserved() - before
        print(
            f"{shape}: steps predicted {info.step_bytes / MIB:.0f} MiB, reserved {grown / MIB:.0f} MiB more "
            f"than after the start, allocated at most {torch.cuda.max_memory_allocated() / MIB:.0f} MiB"
        )
        assert grown <= info.step_bytes, "steps need more memory than predicted"
