"""The kernels in CUDA C++ compile without a GPU, ask for their inputs before they wait, and are kept."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from mizzen.engine.config import EngineOptions
from mizzen.engine.execution.graph_capture import capture_graph
from mizzen.engine.execution.step import StepExecutor
from mizzen.engine.loading import warmup
from mizzen.layers.context import BuildContext
from mizzen.layers.context import skinny as make_skinny
from mizzen.layers.embedding import Embedding, Head, TiedHead
from mizzen.layers.linear import SmallBatchLinear, max_small_batch

pytest.importorskip("cuda.bindings", reason="this PyTorch comes without CUDA's bindings")
triton = pytest.importorskip("triton", reason="this PyTorch comes without Triton")

from mizzen.kernels import launch, nvrtc  # noqa: E402
from mizzen.kernels.attention import flash_decode_mma  # noqa: E402
from mizzen.kernels.attention.flash_decode_triton import DecodeTiling, LayerKV, QKVPrep, Workspace  # noqa: E402
from mizzen.kernels.comm import allreduce_rmsnorm, peer_broadcast  # noqa: E402
from mizzen.kernels.gemm import gate_up_swiglu, gemv, hopper, small_m, swap_ab, tile_configs  # noqa: E402
from mizzen.kernels.sampling import top_k_top_p  # noqa: E402

HOPPER, BLACKWELL = (9, 0), (10, 0)
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@pytest.fixture
def dumped(tmp_path: Path) -> Callable[[bytes, str], str]:
    """Return what the disassembler tells of compiled code when it is asked for something."""
    if not DISASSEMBLER.exists():
        pytest.skip("there is no disassembler here")

    def dump(code: bytes, what: str) -> str:
        path = tmp_path / "kernel.cubin"
        path.write_bytes(code)
        run = [DISASSEMBLER, what, path]
        return subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout

    return dump


def sizes(columns: int, gate: int) -> tuple[tuple[str, int], ...]:
    return (("COLUMNS", columns), ("PARTS", 2), ("TILES", 2), ("LOADS", 4), ("GATE", gate))


def attention(cache: torch.dtype, projected: bool) -> tuple[tuple[str, int], ...]:
    return flash_decode_mma.definitions(128, 4, 8, 16, None, 4, cache, norm=True, projected=projected)


@pytest.mark.parametrize(
    ("source", "name", "defines", "ahead"),
    [
        (gemv.SOURCE, "gemv", gemv.definitions(1024, gate=False, norm=False, add=False), 4),
        (gemv.SOURCE, "gemv", gemv.definitions(1024, gate=True, norm=True, add=True), 9),
        (gemv.SOURCE, "gemv", gemv.definitions(25600, gate=False, norm=False, add=False), 13),
        (
            gemv.SOURCE,
            "gemv",
            gemv.definitions(gemv.max_columns(False), gate=False, norm=False, add=False),
            16,
        ),
        (gemv.SOURCE, "gemv", gemv.definitions(gemv.max_columns(True), gate=True, norm=False, add=False), 16),
        (small_m.SOURCE, "skinny", sizes(1024, 0), 8),
        (small_m.SOURCE, "skinny", sizes(4096, 1), 8),
        (flash_decode_mma.SOURCE, "paged", attention(torch.bfloat16, True), 16),
        (flash_decode_mma.SOURCE, "paged", attention(torch.float8_e4m3fn, True), 8),
        (allreduce_rmsnorm.SOURCE, "reduce", allreduce_rmsnorm.definitions(4096, 2, 32, "push"), 1),
        (allreduce_rmsnorm.SOURCE, "reduce", allreduce_rmsnorm.definitions(5120, 8, 32, "read"), 1),
        (allreduce_rmsnorm.SOURCE, "reduce", allreduce_rmsnorm.definitions(5120, 4, 32, "shared"), 1),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 9 else "",
)
def test_loads_stand_before_the_wait(
    source: str,
    name: str,
    defines: tuple[tuple[str, int], ...],
    ahead: int,
    dumped: Callable[[bytes, str], str],
) -> None:
    instructions = dumped(nvrtc.compile_cubin(source, name, defines, HOPPER), "--dump-sass")
    found = re.findall(r"\b(LDG\.E\S*\.128\S*|ACQBULK)", instructions)
    # The compiler may move loads of the read-only path behind the wait, and then nothing overlaps.
    assert found.index("ACQBULK") == ahead


def test_long_rows_are_multiplied_as_they_were_measured() -> None:
    def widest(rows: int, columns: int) -> int:
        return swap_ab.widest(torch.empty(rows, columns, device="meta"))

    assert widest(5120, 25600) == 64
    assert widest(5120, 17408) == widest(8192, 28672) == 0
    assert widest(4096, 12288) > 64


@pytest.mark.parametrize("gate", [False, True])
def test_a_row_of_any_length_that_is_served_is_wholly_in_flight(gate: bool) -> None:
    """What a block does not ask for at once, it never sums."""
    for columns in range(8, gemv.max_columns(gate) + 8, 8):
        defines = dict(gemv.definitions(columns, gate=gate, norm=False, add=False))
        assert defines["LOADS"] * defines["SHARE"] * 32 >= defines["VECTORS"] == columns // 8
        assert defines["LOADS"] * (1 + gate) <= gemv.LOADS


@pytest.mark.parametrize("batch", [16, 48, 208, 256])
@pytest.mark.parametrize(
    "cut",
    [swap_ab.Cut(64, 2, 1), swap_ab.Cut(128, 3, 2), swap_ab.Cut(128, 4, 2), swap_ab.Cut(192, 1, 2)],
    ids=str,
)
def test_products_of_batches_compile_for_tensor_cores(
    cut: swap_ab.Cut, batch: int, dumped: Callable[[bytes, str], str]
) -> None:
    assert cut.serves(6144, 4096, batch)
    defines = swap_ab.definitions(batch, cut, cut.stages(batch, 16), gate=batch == 48)
    code = nvrtc.compile_cubin(hopper.kernel_source("swap_ab", batch), "wide", defines, HOPPER)
    instructions = dumped(code, "--dump-sass")
    assert f"HGMMA.64x{batch}x16" in instructions and "UTMALDG" in instructions
    # A fence in the loop would cost more than the product; sums that leave their registers, too.
    loop = instructions[: instructions.rindex("HGMMA")]
    assert loop[instructions.index("HGMMA") :].count("MEMBAR") == 0
    assert "STACK:0 " in dumped(code, "--dump-resource-usage")


@pytest.mark.parametrize(
    ("rows", "count", "wanted"),
    [
        (24576, 512, False),  # not measured
        (24576, 1024, True),  # 384 items of 66 at once: 6 rounds, the last nearly full
        (24576, 1280, False),  # 480: 8 rounds, the last with 18
        (24576, 8392, True),
        (6144, 1024, False),  # 96: 2 rounds
        (6144, 2048, True),
        (25600, 1024, False),  # 400: 7 rounds, the last with 4
        (25600, 8192, True),
    ],
)
def test_the_gated_product_of_prompts_is_taken_where_clusters_are_full(
    rows: int, count: int, wanted: bool
) -> None:
    assert gate_up_swiglu.pays(rows, count, 66) is wanted


def test_the_gated_product_of_prompts_stays_in_registers(dumped: Callable[[bytes, str], str]) -> None:
    code = nvrtc.compile_cubin(*gate_up_swiglu.kernel(), HOPPER)
    instructions = dumped(code, "--dump-sass")
    assert all(name in instructions for name in ("HGMMA.64x128x16", "UTMALDG.4D", "UTMALDG.2D.MULTICAST"))
    loop = instructions[instructions.index("HGMMA") : instructions.rindex("HGMMA")]
    assert loop.count("MEMBAR") == 0
    assert "STACK:0 " in dumped(code, "--dump-resource-usage")
    assert gate_up_swiglu.SHARED + 2 * gate_up_swiglu.STAGES * 8 <= hopper.SHARED_BYTES


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab", [1, 32003, 151936])
def test_draws_with_filters_compile_and_stay_in_registers(
    vocab: int, dtype: torch.dtype, dumped: Callable[[bytes, str], str]
) -> None:
    code = nvrtc.compile_cubin(top_k_top_p.SOURCE, "filters", top_k_top_p.definitions(vocab, dtype), HOPPER)
    used = dumped(code, "--dump-resource-usage")
    (stack,) = re.findall(r"STACK:(\d+) ", used)
    assert int(stack) <= (0 if vocab % top_k_top_p.EACH == 0 else 32)


@pytest.mark.parametrize(
    ("pairs", "cut", "cut_8_bit"),
    [
        (1, (64, 8), (64, 8)),
        (16, (8, 8), (8, 8)),
        (64, (2, 8), (2, 8)),
        (128, (1, 8), (1, 8)),
        (160, (2, 4), (3, 4)),
        (192, (2, 4), (2, 4)),
        (256, (1, 4), (2, 4)),
        (264, (1, 4), (2, 4)),
        (384, (1, 4), (1, 4)),
        (512, (1, 8), (1, 4)),
        (640, (1, 4), (1, 4)),
        (4096, (1, 4), (1, 4)),
    ],
)
def test_attention_is_cut_as_was_measured_on_132_multiprocessors(
    pairs: int, cut: tuple[int, int], cut_8_bit: tuple[int, int]
) -> None:
    assert flash_decode_mma.cut_of(pairs, 132, flash_decode_mma.RESIDENT[128, torch.bfloat16]) == cut
    assert (
        flash_decode_mma.cut_of(pairs, 132, flash_decode_mma.RESIDENT[128, torch.float8_e4m3fn]) == cut_8_bit
    )


def test_cuts_of_served_shapes() -> None:
    for rows, columns in (
        (4096, 1024),
        (24576, 4096),
        (4096, 12288),
        (2560, 5120),
        (2048, 8192),
        (16384, 2048),
    ):
        for batch in range(1, 257):
            cut = swap_ab.cut_of(rows, columns, batch)
            assert cut is not None and -(-rows // cut.rows) * cut.split <= swap_ab.MULTIPROCESSORS
    assert swap_ab.cut_of(4096, 100, 8) is None
    assert swap_ab.cut_of(4096, 1024, 257) is None


def test_batches_that_were_not_measured_are_cut_as_the_next_that_was_or_the_next_that_can_be() -> None:
    assert swap_ab.fitting(4096, 4096, 140) == (144, swap_ab.Cut(*tile_configs.CUTS[4096, 4096][192]))
    assert swap_ab.fitting(24576, 4096, 145) == (160, swap_ab.Cut(192, 1, 1))
    assert swap_ab.fitting(4096, 1024, 70) == (80, swap_ab.Cut(64, 1, 2))
    four = swap_ab.Cut(64, 1, 4)  # blocks that each fetch a fourth of x, in eights
    assert swap_ab.fitting(4096, 1024, 65, four) == (96, four)
    assert swap_ab.fitting(4096, 1024, 250, swap_ab.Cut(192, 1, 3)) is None


@pytest.mark.parametrize(("capability", "most"), [((9, 0), 192), ((10, 0), 4), ((12, 0), 4)])
def test_only_hopper_gets_products_of_groups_of_warps(
    capability: tuple[int, int], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Weight:
        shape, device = (4096, 12288), torch.device("cuda")
        numel = staticmethod(lambda: 4096 * 12288)

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(gemv, "serves", lambda weight, gate: True)
    launch.has_wgmma.cache_clear()
    assert max_small_batch(cast(torch.Tensor, Weight())) == most
    launch.has_wgmma.cache_clear()


def test_kernels_for_hopper_and_later_compile_for_both() -> None:
    fit = swap_ab.fitting(6144, 4096, 40)
    assert fit is not None
    with pytest.raises(nvrtc.CompileError, match="not supported"):
        nvrtc.compile_cubin(*swap_ab.kernel(4096, *fit, gate=False, late=True), BLACKWELL)
    for source, name, defines in (
        (gemv.SOURCE, "gemv", gemv.definitions(1024, gate=True, norm=True, add=True)),
        (small_m.SOURCE, "skinny", sizes(4096, 1)),
        (flash_decode_mma.SOURCE, "paged", attention(torch.float8_e4m3fn, True)),
        (top_k_top_p.SOURCE, "filters", top_k_top_p.definitions(151936, torch.bfloat16)),
        (allreduce_rmsnorm.SOURCE, "reduce", allreduce_rmsnorm.definitions(4096, 2, 32, "push")),
        (peer_broadcast.SOURCE, "tokens", peer_broadcast.definitions(512, 4, 256)),
    ):
        assert nvrtc.compile_cubin(source, name, defines, BLACKWELL)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """What products are compiled from, where nothing is compiled or launched."""
    found: set[tuple[Any, ...]] = set()
    for module in (swap_ab, gate_up_swiglu):
        monkeypatch.setattr(module, "compiled", lambda *kernel: found.add(kernel[:-1]))
        monkeypatch.setattr(module, "launch", lambda *launch, **how: None)
    for module in (swap_ab, gate_up_swiglu, hopper):
        monkeypatch.setattr(module, "make_tensor_map", lambda *dims: None)
    monkeypatch.setattr(gate_up_swiglu, "clusters", lambda device: 66)
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    return found


@pytest.mark.parametrize("gate", [False, True])
def test_what_is_compiled_ahead_is_what_products_ask_for(gate: bool, asked: set[tuple[Any, ...]]) -> None:
    method = SmallBatchLinear(24576 if gate else 6144, 4096, False, torch.bfloat16, torch.device("meta"))
    method.widest, method.max_swiglu_batch, method.defer_pdl = 48, 256, True
    method.gates_prompts = True
    sizes = (1, 2, 4, *range(8, 513, 8), 1024)
    for count in sizes:
        if small_m.widest(method.weight) < count <= (256 if gate else 48) or (gate and count == 1024):
            x = torch.empty(count, 4096, dtype=torch.bfloat16, device="meta")
            method.gated(x) if gate else method.apply(x)
    assert len(asked) == (17 if gate else 3)
    assert asked == method.kernels(sizes, gate=gate)


@pytest.mark.parametrize("tied", [False, True])
def test_heads_of_small_vocabularies_are_compiled_ahead(tied: bool, asked: set[tuple[Any, ...]]) -> None:
    build = BuildContext(device=torch.device("meta"), dtype=torch.bfloat16, linear=make_skinny)
    table = Embedding(build, "table", 32768, 4096)
    head: TiedHead | Head = TiedHead(build, table) if tied else Head(build, "head", 32768, 4096)
    (head if isinstance(head, TiedHead) else cast(SmallBatchLinear, head.method)).widest = 192
    sizes = (1, 2, 4, *range(8, 257, 8))
    for count in range(8, 193, 8):
        head(torch.empty(count, 4096, dtype=torch.bfloat16, device="meta"))
    assert len(asked) == 12
    assert asked == head.kernels(sizes)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_what_is_compiled_ahead_is_what_attention_asks_for(
    stored: torch.dtype, norm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: set[tuple[Any, ...]] = set()
    monkeypatch.setattr(flash_decode_mma, "compiled", lambda *kernel: found.add(kernel[:-1]))
    monkeypatch.setattr(flash_decode_mma, "launch", lambda *launch, **how: None)
    kv_heads, group, size, page = 8, 4, 128, 16
    some = torch.empty(1, dtype=torch.int32, device="meta")
    keys = torch.empty(page, kv_heads, size, dtype=stored, device="meta")
    cache = LayerKV(keys=keys, values=keys, slots=some, lengths=some, table=some[None], page_size=page)
    space = SplitWorkspace(sums=some, stats=some, counters=some)
    scales = (some, some) if norm else None
    raw = QKVPrep(norms=scales, epsilon=1e-6, cos=some, sin=some, cells=some)
    for rows in range(1, 300):
        parts, warps = flash_decode_mma.cut_of(rows * kv_heads, 132, flash_decode_mma.RESIDENT[size, stored])
        cut = DecodeTiling(splits=parts, block=16, warps=warps, stages=0)
        q = torch.empty(rows, kv_heads * group, size, device="meta")
        for window, how, items in product((None, 1000), (raw, None), (None, some)):
            flash_decode_mma.attend(q, how, cache, q, window, cut, space, items)
    assert found == flash_decode_mma.kernels(keys, group, page, (None, 1000), norm=norm)
    assert len(found) == 16


def test_what_graphs_multiply_by_is_compiled_before_the_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[set[int] | str] = []
    graphs = SimpleNamespace(sizes=[1, 8, 32])
    prefill = SimpleNamespace(sizes=[16, 64, 384], rows=48)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(warmup, "make_graphs", lambda options, step: graphs)
    monkeypatch.setattr(warmup, "make_prefill_graphs", lambda options, step: prefill)
    monkeypatch.setattr(warmup, "compile_kernels", lambda step, counts, *how: done.append(counts))
    monkeypatch.setattr(warmup, "CudaRunner", lambda *how: done.append("captured"))
    options, step = EngineOptions(model="model", device="cuda"), cast(StepExecutor, SimpleNamespace(model=None))
    warmup.make_runner(options, step, torch.device("cuda"), None, lambda done, total: None)
    assert done == [{1, 8, 32, 16, 64, 384, 48}, "captured"]


def test_a_graph_is_captured_of_what_has_run_and_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []

    @contextmanager
    def graph(made: object, **how: object) -> Iterator[None]:
        done.append(how)
        yield
        done.append(made)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: "graph")
    monkeypatch.setattr(torch.cuda, "graph", graph)
    stream = cast(torch.cuda.Stream, SimpleNamespace(synchronize=lambda: done.append("ended")))
    assert capture_graph(lambda: done.append("run"), stream, (0, 1)) == "graph"
    how = {"pool": (0, 1), "stream": stream, "capture_error_mode": "thread_local"}
    assert done == ["run", "ended", how, "run", "graph"]


def test_every_measured_cut_serves_its_shape() -> None:
    for (rows, columns), cuts in tile_configs.CUTS.items():
        for batch, cut in cuts.items():
            assert batch in swap_ab.BATCHES and swap_ab.Cut(*cut).serves(rows, columns, batch), (
                rows,
                columns,
                batch,
            )
    for (rows, columns), most in tile_configs.WIDEST.items():
        assert most in (0, *swap_ab.BATCHES)
        assert all(swap_ab.cut_of(rows, columns, batch) for batch in swap_ab.BATCHES if batch <= most)


@pytest.mark.parametrize("name", ["tokens", "lookup", "meet"])
def test_what_ranks_share_compiles(name: str) -> None:
    assert nvrtc.compile_cubin(peer_broadcast.SOURCE, name, peer_broadcast.definitions(512, 4, 256), HOPPER)


def test_a_kernel_is_compiled_once_and_again_where_its_file_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "cache"))
    runs: list[str] = []
    compile_it = nvrtc.cubin
    monkeypatch.setattr(nvrtc, "cubin", lambda *what: (runs.append(what[1]), compile_it(*what))[1])
    defines = gemv.definitions(256, gate=False, norm=False, add=False)

    def found(source: str = gemv.SOURCE) -> bytes:
        return nvrtc.load_or_compile_cubin(source, "gemv", defines, HOPPER)

    first = found()
    (kept,) = (tmp_path / "cache" / "kernels").iterdir()
    whole = kept.read_bytes()
    assert (found(), len(runs)) == (first, 1)
    for damaged in (b"", whole[:-1], whole[:20], whole + b"more", whole[:-1] + b"?"):
        kept.write_bytes(damaged)
        before = len(runs)
        assert (found(), found(), len(runs)) == (first, first, before + 1)
        assert kept.read_bytes() == whole
    before = len(runs)
    found(gemv.SOURCE + " ")
    assert len(runs) == before + 1


def test_a_full_disk_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*paths: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(nvrtc.os, "replace", full)
    defines = gemv.definitions(256, gate=False, norm=False, add=False)
    assert nvrtc.load_or_compile_cubin(gemv.SOURCE, "gemv", defines, HOPPER)
    assert not list((tmp_path / "kernels").iterdir())


def test_a_cache_that_cannot_be_written_costs_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MIZZEN_CACHE_DIR", str(tmp_path / "file"))
    defines = gemv.definitions(256, gate=False, norm=False, add=False)
    assert nvrtc.load_or_compile_cubin(gemv.SOURCE, "gemv", defines, HOPPER)


def test_an_error_is_the_compilers() -> None:
    with pytest.raises(nvrtc.CompileError, match="nonsense"):
        nvrtc.compile_cubin("nonsense", "wrong", (), HOPPER)
