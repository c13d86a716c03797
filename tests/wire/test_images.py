# SPDX-License-Identifier: Apache-2.0
"""The engine's server fetches images from gateways; wrong parts end only the request they belong to."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from mizzen.core.images.types import MissingImages, PromptImage
from mizzen.core.request import FinishReason
from mizzen.wire.messages import (
    FILE_PART_BYTES,
    OLDEST_PROTOCOL,
    Abort,
    Hello,
    ImageContent,
    ImageReference,
    NeedImages,
    Outputs,
    RefusalCode,
    Refused,
    Welcome,
)
from mizzen.wire.server.image_validation import ImageShape, PlacedImages

PLACEHOLDER = 99
PROMPT = [1, 2, PLACEHOLDER, PLACEHOLDER, PLACEHOLDER, 3]
POSITIONS = (2, 3, 4)


class OneRow:
    """Rules of a model for which an image has one embedding for each 10 pixels of its width."""

    placeholder_id = PLACEHOLDER

    def measure(self, reference: ImageReference) -> ImageShape:
        if reference.height > 1000:
            raise ValueError("the image is too high")
        return ImageShape((1, 1, reference.width // 10), reference.width // 10)

    def place(self, images: tuple[PromptImage, ...], prompt_tokens: int) -> PlacedImages:
        return PlacedImages(images, np.zeros((3, prompt_tokens), np.int32), -2)

    def hash_content(self, reference: ImageReference, content: bytes) -> bytes:
        return hashlib.sha256(content).digest()


def picture(content: bytes, at: tuple[int, ...] = POSITIONS, **fields: Any) -> ImageReference:
    packed = np.array(at, dtype="<i4").tobytes()
    values = {"digest": hashlib.sha256(content).digest(), "size": len(content), "width": 30, "height": 20}
    return ImageReference(**{"positions": packed, **values, **fields})


@pytest.fixture
def imaging(make_bench: Callable[..., Any]) -> Any:
    return make_bench(images=OneRow())


def submit(bench: Any, gateway: Any, rid: int, *contents: bytes) -> int:
    """Send a request with an image after another; return the engine's id."""
    prompt, images = [1, 2], []
    for content in contents:
        images.append(picture(content, tuple(range(len(prompt), len(prompt) + 3))))
        prompt += [PLACEHOLDER] * 3
    return bench.submit(gateway, rid, prompt=prompt, images=tuple(images))


def need(bench: Any, rid: int, *contents: bytes) -> None:
    """Let the engine request images for one of its requests."""
    digests = tuple(hashlib.sha256(content).digest() for content in contents)
    bench.server.request_images([MissingImages(rid, digests)])


def send(gateway: Any, handle: int, content: bytes, offset: int = 0, end: int | None = None) -> None:
    """Send a part of an image."""
    digest = hashlib.sha256(content).digest()
    gateway.send(ImageContent(handle, digest, offset, content[offset:end]))


def ended(bench: Any, gateway: Any) -> Any:
    """Return the one result of the next outputs."""
    (finish,) = bench.expect(gateway, Outputs).finished
    return finish


def buffered(bench: Any) -> int:
    return bench.server._images.buffered_bytes


class TestReferences:
    def test_request_has_its_images_and_their_rotary_positions(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        rid = imaging.submit(gateway, 7, prompt=PROMPT, images=(picture(b"cat"),))
        request = imaging.requests[rid]
        (image,) = request.images
        assert (image.digest, image.grid) == (hashlib.sha256(b"cat").digest(), (1, 1, 3))
        assert image.positions.tolist() == list(POSITIONS)
        assert request.rotary.shape == (3, len(PROMPT))
        assert request.rotary_offset == -2

    @pytest.mark.parametrize(
        ("fields", "words"),
        [
            ({"digest": b"short"}, "digest of 5 bytes"),
            ({"positions": b"\0\0\0"}, "not a multiple of 4"),
            ({"positions": np.array([2, 3], "<i4").tobytes()}, "2 positions, but 3 embeddings"),
            ({"positions": np.array([2, 4, 3], "<i4").tobytes()}, "must ascend"),
            ({"positions": np.array([3, 3, 4], "<i4").tobytes()}, "must ascend"),
            ({"positions": np.array([-1, 3, 4], "<i4").tobytes()}, "must ascend between 0 and 5"),
            ({"positions": np.array([3, 4, 6], "<i4").tobytes()}, "must ascend between 0 and 5"),
            ({"positions": np.array([2, 3, 5], "<i4").tobytes()}, "other tokens than the placeholder"),
            ({"positions": b"", "width": 5}, "0 positions, but 0 embeddings"),
            ({"size": 0}, "0 bytes; 1 to"),
            ({"size": 2**40}, "bytes; 1 to"),
            ({"width": 0}, "0 x 20 pixels"),
            ({"height": 2**21}, "pixels; each side"),
            ({"height": 1001}, "image 1: the image is too high"),
            ({"min_pixels": -5}, "bounds of -5"),
        ],
    )
    def test_invalid_reference_is_refused(self, imaging: Any, fields: dict[str, Any], words: str) -> None:
        gateway = imaging.gateway()
        gateway.generate(7, PROMPT, images=(picture(b"cat", **fields),))
        refused = imaging.expect(gateway, Refused)
        assert (refused.rid, refused.code) == (7, RefusalCode.INVALID)
        assert refused.message.startswith("images")
        assert words in refused.message
        assert imaging.server.out.counters.images_rejected["reference"] == 1
        assert submit(imaging, gateway, 7, b"dog") is not None

    @pytest.mark.parametrize(
        ("second", "words"),
        [
            (picture(b"dog", (3, 4, 5)), "must ascend between 5"),
            (picture(b"cat", (5, 6, 7), size=9), "digest of an earlier one"),
        ],
    )
    def test_second_image_must_fit_the_first(self, imaging: Any, second: ImageReference, words: str) -> None:
        gateway = imaging.gateway()
        gateway.generate(7, [1, 2] + [PLACEHOLDER] * 6, images=(picture(b"cat"), second))
        assert words in imaging.expect(gateway, Refused).message

    def test_number_and_total_size_of_images_are_bounded(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        gateway.generate(1, PROMPT, images=(picture(b"cat"),) * 1025)
        assert "1025 entries" in imaging.expect(gateway, Refused).message
        gateway.generate(1, PROMPT, images=(picture(b"cat", size=2**28),) * 5)
        assert "bytes together" in imaging.expect(gateway, Refused).message

    def test_engine_without_images_refuses_them(self, bench: Any) -> None:
        gateway = bench.gateway()
        gateway.generate(7, PROMPT, images=(picture(b"cat"),))
        assert bench.expect(gateway, Refused).message.startswith("images must be empty")
        send(gateway, 7, b"cat")
        assert bench.submit(gateway, 8) is not None

    def test_connection_of_the_former_protocol_gets_no_requests_for_images(self, imaging: Any) -> None:
        gateway = imaging.gateway(hello=False)
        gateway.send(Hello(OLDEST_PROTOCOL, "old"))
        imaging.expect(gateway, Welcome)
        gateway.generate(7, PROMPT, images=(picture(b"cat"),))
        assert "version 3" in imaging.expect(gateway, Refused).message


class TestTransfers:
    def test_parts_are_assembled_in_order(self, imaging: Any) -> None:
        gateway, content = imaging.gateway(), bytes(range(256)) * 4096
        rid = submit(imaging, gateway, 7, content)
        need(imaging, rid, content)
        message = imaging.expect(gateway, NeedImages)
        assert (message.rid, message.digests) == (7, (hashlib.sha256(content).digest(),))
        half = len(content) // 2
        send(gateway, 7, content, 0, half)
        imaging.until(lambda: buffered(imaging) == half)
        assert not imaging.images
        send(gateway, 7, content, half)
        imaging.until(lambda: imaging.images)
        (image,) = imaging.images
        assert (image.rid, image.content) == (rid, content)
        assert (image.reference.width, image.reference.height) == (30, 20)
        assert not len(imaging.server._images)
        counters = imaging.server.out.counters
        assert (counters.images_requested, counters.images_received) == (1, 1)
        assert counters.image_bytes == len(content)

    def test_largest_part_is_accepted(self, imaging: Any) -> None:
        gateway, content = imaging.gateway(), bytes(FILE_PART_BYTES)
        need(imaging, submit(imaging, gateway, 7, content), content)
        imaging.expect(gateway, NeedImages)
        send(gateway, 7, content)
        imaging.until(lambda: imaging.images)

    def test_image_of_two_requests_is_requested_once(self, imaging: Any) -> None:
        first, second = imaging.gateway(), imaging.gateway()
        rids = [submit(imaging, gateway, 7, b"cat") for gateway in (first, second)]
        for rid in rids:
            need(imaging, rid, b"cat")
        imaging.expect(first, NeedImages)
        assert imaging.server.out.counters.images_requested == 1
        send(first, 7, b"cat")
        imaging.until(lambda: imaging.images)
        assert second.take(NeedImages) is None

    def test_other_request_becomes_the_source_when_the_first_one_ends(self, imaging: Any) -> None:
        first, second = imaging.gateway(), imaging.gateway()
        rids = [submit(imaging, gateway, 7, b"cat" * 100) for gateway in (first, second)]
        for rid in rids:
            need(imaging, rid, b"cat" * 100)
        imaging.expect(first, NeedImages)
        send(first, 7, b"cat" * 100, 0, 50)
        imaging.until(lambda: buffered(imaging) == 50)
        first.hello()  # ends the connection's requests
        assert imaging.expect(second, NeedImages).rid == 7
        assert not buffered(imaging)
        send(second, 7, b"cat" * 100)
        imaging.until(lambda: imaging.images)
        assert imaging.images[0].rid == rids[1]

    def test_aborted_request_frees_what_has_arrived(self, imaging: Any) -> None:
        gateway, content = imaging.gateway(), bytes(1000)
        rid = submit(imaging, gateway, 7, content)
        need(imaging, rid, content)
        imaging.expect(gateway, NeedImages)
        send(gateway, 7, content, 0, 500)
        imaging.until(lambda: buffered(imaging) == 500)
        gateway.send(Abort(7))
        imaging.until(lambda: imaging.aborts == [rid])
        imaging.step(1, [], (imaging.end(rid, FinishReason.ABORT),))
        imaging.pump()
        assert not buffered(imaging)
        assert not len(imaging.server._images)
        send(gateway, 7, content, 500)  # was sent before the gateway saw the end
        rid = submit(imaging, gateway, 7, content)
        assert rid in imaging.requests

    def test_image_is_requested_again_if_the_engine_needs_it_again(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        rid = submit(imaging, gateway, 7, b"cat")
        for times in (1, 2):
            need(imaging, rid, b"cat")
            imaging.expect(gateway, NeedImages)
            send(gateway, 7, b"cat")
            imaging.until(lambda: len(imaging.images) == times)  # noqa: B023

    def test_images_under_way_are_bounded_for_each_gateway(self, make_bench: Callable[..., Any]) -> None:
        bench = make_bench(images=OneRow(), gateway_image_bytes=250, image_bytes=450)
        contents = [bytes([number]) * 100 for number in range(4)]
        greedy, modest = bench.gateway(), bench.gateway()
        need(bench, submit(bench, greedy, 1, *contents), *contents)
        need(bench, submit(bench, modest, 1, b"m" * 100), b"m" * 100)
        bench.expect(modest, NeedImages)
        assert len(bench.expect(greedy, NeedImages).digests) == 2
        for number, content in enumerate(contents):
            send(greedy, 1, content)
            bench.until(lambda: len(bench.images) == number + 1)  # noqa: B023
        assert bench.server.out.counters.images_requested == 5


class TestHostileParts:
    @pytest.mark.parametrize(
        ("digest", "offset", "size", "words"),
        [
            (None, 10, 10, "10 bytes at offset 10 are not the next part"),
            (None, 0, 0, "0 bytes at offset 0"),
            (None, 0, 101, "101 bytes at offset 0"),
            (None, -1, 10, "offset -1"),
            (bytes(32), 0, 10, "was not requested"),
            (b"", 0, 10, "was not requested"),
        ],
    )
    def test_wrong_part_ends_only_its_request(
        self, imaging: Any, digest: bytes | None, offset: int, size: int, words: str
    ) -> None:
        gateway, content = imaging.gateway(), b"x" * 100
        good = submit(imaging, gateway, 1, b"good")
        bad = submit(imaging, gateway, 2, content)
        for rid, part in ((good, b"good"), (bad, content)):
            need(imaging, rid, part)
        imaging.until(lambda: imaging.server.out.counters.images_requested == 2)
        wanted = hashlib.sha256(content).digest() if digest is None else digest
        gateway.send(ImageContent(2, wanted, offset, bytes(size)))
        finish = ended(imaging, gateway)
        assert (finish.rid, finish.reason, finish.at_fault) == (2, FinishReason.ERROR, True)
        assert finish.message.startswith("images: ")
        assert words in finish.message
        assert imaging.aborts == [bad]
        assert imaging.server.out.counters.images_rejected["parts"] == 1
        send(gateway, 1, b"good")
        imaging.until(lambda: imaging.images)
        assert imaging.images[0].rid == good

    def test_part_before_the_request_for_it_ends_the_request(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        submit(imaging, gateway, 7, b"cat")
        send(gateway, 7, b"cat")
        assert "not requested" in ended(imaging, gateway).message

    def test_wrong_content_ends_its_request_and_another_request_provides_the_image(
        self, imaging: Any
    ) -> None:
        liar, honest = imaging.gateway(), imaging.gateway()
        rids = [submit(imaging, gateway, 7, b"cat") for gateway in (liar, honest)]
        for rid in rids:
            need(imaging, rid, b"cat")
        imaging.expect(liar, NeedImages)
        liar.send(ImageContent(7, hashlib.sha256(b"cat").digest(), 0, b"dog"))
        finish = ended(imaging, liar)
        assert finish.at_fault
        assert "does not have the digest" in finish.message
        imaging.expect(honest, NeedImages)
        send(honest, 7, b"cat")
        imaging.until(lambda: imaging.images)
        assert (imaging.images[0].rid, imaging.images[0].content) == (rids[1], b"cat")

    def test_parts_that_stop_end_the_request_but_not_by_its_fault(self, imaging: Any) -> None:
        gateway, content = imaging.gateway(), bytes(1000)
        rid = submit(imaging, gateway, 7, content)
        need(imaging, rid, content)
        imaging.expect(gateway, NeedImages)
        imaging.now += 29
        send(gateway, 7, content, 0, 500)
        imaging.until(lambda: buffered(imaging) == 500)
        imaging.now += 29  # the time counts from the last part
        imaging.pump()
        assert not imaging.aborts
        imaging.now += 2
        finish = ended(imaging, gateway)
        assert (finish.reason, finish.at_fault) == (FinishReason.ERROR, False)
        assert "within 30 s" in finish.message
        assert not buffered(imaging)

    def test_request_with_output_can_be_ended(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        rid = submit(imaging, gateway, 7, b"cat")
        imaging.step(1, [(rid, 0, [5])])
        imaging.expect(gateway, Outputs)
        need(imaging, rid, b"cat")
        imaging.expect(gateway, NeedImages)
        send(gateway, 7, b"ca")
        assert ended(imaging, gateway).rid == 7
        (peer,) = imaging.server.out.peers
        assert (peer.unstarted, peer.handles) == (0, {})

    def test_parts_for_unknown_handles_are_ignored(self, imaging: Any) -> None:
        gateway = imaging.gateway()
        send(gateway, 2**40, b"cat")
        send(gateway, 3, b"cat")
        assert submit(imaging, gateway, 4, b"cat") is not None
        assert gateway.take(Outputs) is None

    def test_flood_of_parts_leaves_room_for_other_frames(self, imaging: Any) -> None:
        flood, modest = imaging.gateway(), imaging.gateway()
        for _ in range(20):
            flood.send(ImageContent(1, bytes(32), 0, bytes(FILE_PART_BYTES)))
        assert imaging.submit(modest, 1) is not None


def test_references_survive_the_wire() -> None:
    reference = picture(b"cat", min_pixels=4, max_pixels=9)
    packed = msgspec.msgpack.encode(reference)
    assert msgspec.msgpack.decode(packed, type=ImageReference) == reference
