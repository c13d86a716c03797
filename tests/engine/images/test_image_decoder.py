# SPDX-License-Identifier: Apache-2.0
"""`ImageDecoder` decodes in confined processes, and one image's failure does not affect other images."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import decoder_kit as kit
import numpy as np
import psutil
import pytest

from mizzen.engine.images.buffers import KEPT_PIXEL_BYTES
from mizzen.engine.images.decode_process import MEMORY_CHECK_IMAGES
from mizzen.engine.images.decoder import ImageDecoder
from mizzen.engine.images.pool import DecodePool
from mizzen.engine.images.tasks import DecodedImage, DecodeFailure
from mizzen.images.decode import decode_image

MakeDecoder = Callable[..., ImageDecoder]
PATIENCE = 60.0
SIZE = (60, 40)
SMALL = kit.encode_image(*SIZE)


def results(decoder: ImageDecoder, count: int) -> Iterator[DecodedImage]:
    """Yield `count` results, within PATIENCE seconds."""
    end = time.monotonic() + PATIENCE
    while count > 0:
        for result in decoder.drain():
            count -= 1
            yield result
        assert time.monotonic() < end, "no result"
        time.sleep(0.002)


def decode(decoder: ImageDecoder, rules: kit.ProbeRules, width: int = 60, key: bytes = b"k") -> DecodedImage:
    """Decode an image with this width, and return the result."""
    decoder.submit(key, kit.encode_image(width, 40), rules, (width, 40))
    (result,) = results(decoder, 1)
    assert result.key == key
    return result


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF"])
def test_pixels_equal_those_decoded_in_this_process(make_decoder: MakeDecoder, kind: str) -> None:
    decoder = make_decoder()
    content = kit.encode_image(123, 77, kind)
    decoder.submit(b"a", content, kit.ProbeRules(), (123, 77))
    (result,) = results(decoder, 1)
    assert result.failure is None and not result.error
    assert result.pixels is not None
    assert np.array_equal(result.pixels, decode_image(content, kit.ProbeRules(), (123, 77), None))
    assert decoder.counts.decoded == 1


@pytest.mark.parametrize("action", kit.FORBIDDEN)
def test_a_process_cannot_call_the_system_for_other_purposes(make_decoder: MakeDecoder, action: str) -> None:
    """The process exits if the call succeeds, and then there are no pixels."""
    decoder = make_decoder()
    assert decode(decoder, kit.ProbeRules(action)).pixels is not None
    assert decoder.confined is True


@pytest.mark.parametrize("action", kit.FORBIDDEN)
def test_an_ordinary_process_can_make_these_calls(action: str) -> None:
    """So the test above fails without the filter."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    code = f"import decoder_kit; decoder_kit.FORBIDDEN[{action!r}]()"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, timeout=PATIENCE)


def test_a_hung_process_is_replaced_and_only_its_image_fails(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(image_seconds=0.5)
    rules = kit.ProbeRules("hang_if_wide")
    assert decode(decoder, rules).pixels is not None
    (first,) = decoder.process_ids
    for key, width in ((b"hangs", 600), (b"waits", 60)):
        decoder.submit(key, kit.encode_image(width, 40), rules, (width, 40))
    hung, waited = results(decoder, 2)
    assert hung == DecodedImage(b"hangs", None, hung.error, DecodeFailure.DEADLINE)
    assert "0.5 s" in hung.error
    assert waited.key == b"waits" and waited.pixels is not None
    assert decoder.counts.restarts == 1
    assert not psutil.pid_exists(first)


def test_a_crashed_process_is_replaced_and_only_its_image_fails(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    rules = kit.ProbeRules("crash_if_wide")
    for key, width in ((b"crashes", 600), (b"waits", 60)):
        decoder.submit(key, kit.encode_image(width, 40), rules, (width, 40))
    crashed, waited = results(decoder, 2)
    assert (crashed.key, crashed.failure) == (b"crashes", DecodeFailure.CRASH)
    assert waited.key == b"waits" and waited.pixels is not None


@pytest.mark.parametrize(
    ("number", "failure"),
    [(signal.SIGKILL, DecodeFailure.CRASH), (signal.SIGSTOP, DecodeFailure.DEADLINE)],
)
def test_a_process_may_be_killed_or_stopped_during_an_image(
    make_decoder: MakeDecoder, number: int, failure: DecodeFailure
) -> None:
    decoder = make_decoder(image_seconds=1.0)
    rules = kit.ProbeRules("hang_if_wide")
    assert decode(decoder, rules).pixels is not None
    (process,) = decoder.process_ids
    decoder.submit(b"a", kit.encode_image(600, 40), rules, (600, 40))
    used = psutil.Process(process).cpu_times().user
    wait_until(lambda: psutil.Process(process).cpu_times().user > used + 0.05)
    os.kill(process, number)
    (result,) = results(decoder, 1)
    assert result.failure is failure
    assert decode(decoder, rules).pixels is not None


def test_an_image_survives_the_death_of_an_idle_process(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    decode(decoder, kit.ProbeRules())
    (process,) = decoder.process_ids
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: decoder.counts.restarts)
    assert decode(decoder, kit.ProbeRules()).pixels is not None


def test_results_name_invalid_images(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    for content in (b"", SMALL[:200], b"GIF89a", SMALL):
        decoder.submit(b"k", content, kit.ProbeRules(), (61, 40))
        (result,) = results(decoder, 1)
        assert result.failure is DecodeFailure.INVALID and result.error and not result.temporary
    assert decoder.counts.failed[DecodeFailure.INVALID] == 4
    assert decoder.counts.restarts == 0


def test_cancelled_images_have_no_results_and_may_be_submitted_again(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    rules = kit.ProbeRules("sleep")
    for key in (b"1", b"2", b"3"):
        decoder.submit(key, SMALL, rules, SIZE)
    wait_until(lambda: decoder.process_ids)
    for key in (b"1", b"2", b"unknown"):
        decoder.cancel(key)
    decoder.submit(b"2", SMALL, rules, SIZE)
    assert [result.key for result in results(decoder, 2)] == [b"3", b"2"]
    assert decoder.pending == 0


def test_a_full_queue_rejects_further_images_until_there_is_room(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(max_waiting=2)
    for key in (b"1", b"2", b"3"):
        decoder.submit(key, SMALL, kit.ProbeRules("sleep"), SIZE)
    rejected, *others = results(decoder, 3)
    assert (rejected.key, rejected.failure, rejected.temporary) == (b"3", DecodeFailure.BUSY, True)
    assert [result.key for result in others if result.pixels is not None] == [b"1", b"2"]
    assert decode(decoder, kit.ProbeRules("sleep")).pixels is not None
    small = make_decoder(max_waiting_bytes=len(SMALL) - 1)
    small.submit(b"k", SMALL, kit.ProbeRules(), SIZE)
    assert next(results(small, 1)).failure is DecodeFailure.BUSY


def test_an_image_does_not_wait_without_limit(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(queue_seconds=0.3, image_seconds=2.0)
    rules = kit.ProbeRules("hang_if_wide")
    decode_time = time.monotonic()
    assert decode(make_decoder(), rules).pixels is not None  # the modules are in the page cache now
    decoder.submit(b"hangs", kit.encode_image(600, 40), rules, (600, 40))
    decoder.submit(b"waits", SMALL, rules, SIZE)
    first = next(results(decoder, 1))
    assert (first.key, first.failure) == (b"waits", DecodeFailure.BUSY)
    assert time.monotonic() - decode_time < PATIENCE


def test_tenants_take_turns(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    rules = kit.ProbeRules("sleep")
    keys = [f"{tenant}{number}".encode() for tenant in (1, 2) for number in range(3)]
    for key in keys:
        decoder.submit(key, SMALL, rules, SIZE, tenant=key[0])
    order = [result.key[:1] for result in results(decoder, 6)]
    assert set(order[:3]) == {b"1", b"2"}, order


def test_large_images_are_not_decoded_at_the_same_time(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(processes=2, pixels_in_work=3000)
    for key in (b"1", b"2", b"3"):
        decoder.submit(key, SMALL, kit.ProbeRules("sleep"), SIZE)
    assert [result.key for result in results(decoder, 3)] == [b"1", b"2", b"3"]
    assert len(decoder.process_ids) == 1


def test_idle_processes_stop_and_start_again(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(idle_seconds=0.2)
    assert decode(decoder, kit.ProbeRules()).pixels is not None
    wait_until(lambda: not decoder.process_ids)
    assert decode(decoder, kit.ProbeRules()).pixels is not None
    assert decoder.counts.restarts == 0


def test_a_decoder_that_does_not_start_fails_images_as_temporary(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    decoder = make_decoder(retry_seconds=0.05)
    result = decode(decoder, kit.ProbeRules())
    assert (result.failure, result.temporary) == (DecodeFailure.UNAVAILABLE, True)


def test_the_hook_is_called_when_there_is_a_result(make_decoder: MakeDecoder) -> None:
    called = threading.Event()
    decoder = make_decoder(called.set)
    decoder.submit(b"k", SMALL, kit.ProbeRules(), SIZE)
    assert called.wait(PATIENCE)
    assert [result.key for result in decoder.drain()] == [b"k"]


def test_close_ends_the_processes_even_during_an_image(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(image_seconds=PATIENCE)
    decoder.submit(b"k", kit.encode_image(600, 40), kit.ProbeRules("hang_if_wide"), (600, 40))
    wait_until(lambda: decoder.process_ids)
    (process,) = decoder.process_ids
    decoder.close()
    assert not psutil.pid_exists(process)
    with pytest.raises(RuntimeError, match="closed"):
        decoder.submit(b"k", SMALL, kit.ProbeRules(), SIZE)


def test_later_images_do_not_change_the_pixels_of_earlier_ones(make_decoder: MakeDecoder) -> None:
    """Small images share memory in the process; larger ones have their own."""
    decoder = make_decoder()
    sizes = [(60, 40), (2660, 2660), (60, 40), (2660, 2660), (90, 70)]
    files = [kit.encode_image(*size, seed=seed) for seed, size in enumerate(sizes)]
    assert KEPT_PIXEL_BYTES < 2660 * 2660 * 3
    for index, (content, size) in enumerate(zip(files, sizes, strict=True)):
        decoder.submit(bytes([index]), content, kit.ProbeRules(), size)
    found = {result.key[0]: result.pixels for result in results(decoder, len(files))}
    assert len(decoder.process_ids) == 1
    for index, (content, size) in enumerate(zip(files, sizes, strict=True)):
        expected = decode_image(content, kit.ProbeRules(), size, None)
        assert np.array_equal(found[index], expected), index


def test_processes_are_replaced_after_many_images(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(processes=2, process_images=5)
    seen: set[int] = set()
    end = time.monotonic() + PATIENCE
    for index in itertools.count():
        decoder.submit(index.to_bytes(4), SMALL, kit.ProbeRules("sleep"), SIZE)
        decoder.submit(index.to_bytes(5), SMALL, kit.ProbeRules("sleep"), SIZE)
        assert all(result.pixels is not None for result in results(decoder, 2))
        seen.update(decoder.process_ids)
        assert len(decoder.process_ids) <= 4
        assert time.monotonic() < end
        if len(seen) >= 6:
            break
    wait_until(lambda: sum(map(psutil.pid_exists, seen)) <= 3)
    assert decoder.counts.restarts == 0


def test_a_process_whose_memory_grows_is_replaced(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder(grown_bytes=32 << 20)
    (first,) = (decode(decoder, kit.ProbeRules("leak")), decoder.process_ids)[1]
    for _ in range(2 * MEMORY_CHECK_IMAGES):
        assert decode(decoder, kit.ProbeRules("leak")).pixels is not None
    wait_until(lambda: not psutil.pid_exists(first))
    assert decode(decoder, kit.ProbeRules("leak")).pixels is not None
    assert decoder.counts.restarts == 0


def test_a_successor_that_does_not_start_leaves_the_process_at_work(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder(process_images=2, retry_seconds=0.01)
    assert decode(decoder, kit.ProbeRules()).pixels is not None
    process = decoder.process_ids
    monkeypatch.setattr(sys, "executable", "/bin/false")
    for _ in range(20):
        assert decode(decoder, kit.ProbeRules()).pixels is not None
        time.sleep(0.02)
    assert process[0] in decoder.process_ids


def test_the_filter_leaves_speculation_as_in_ordinary_processes(make_decoder: MakeDecoder) -> None:
    decoder = make_decoder()
    decode(decoder, kit.ProbeRules())
    fields = [
        re.findall(r"^Specul.*$", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
        for process in (os.getpid(), decoder.process_ids[0])
    ]
    assert fields[0] and fields[0] == fields[1]


def test_the_process_neither_imports_torch_nor_inherits_secrets(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MIZZEN_TEST_SECRET", "x")
    decoder = make_decoder()
    decode(decoder, kit.ProbeRules())
    process = psutil.Process(decoder.process_ids[0])
    assert "MIZZEN_TEST_SECRET" not in process.environ()
    maps = Path(f"/proc/{process.pid}/maps").read_text()
    assert "_imaging" in maps and "torch" not in maps
    targets = [os.readlink(path) for path in Path(f"/proc/{process.pid}/fd").iterdir()]
    kinds = sorted(target.split(":")[0] for target in targets)
    assert kinds == ["/dev/null"] * 3 + ["/memfd", "socket"]  # the memory for pixels


def test_a_failed_thread_fails_its_images_and_is_replaced(
    make_decoder: MakeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = make_decoder()
    assert decode(decoder, kit.ProbeRules()).pixels is not None
    (process,) = decoder.process_ids
    with monkeypatch.context() as patch:
        patch.setattr(DecodePool, "_assign", lambda _: 1 // 0)
        result = decode(decoder, kit.ProbeRules())
    assert (result.failure, result.temporary) == (DecodeFailure.UNAVAILABLE, True)
    assert not psutil.pid_exists(process)
    decoder.submit(b"next", SMALL, kit.ProbeRules(), SIZE)
    assert [found.pixels is not None for found in results(decoder, 1)] == [True]
