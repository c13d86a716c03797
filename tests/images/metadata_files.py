# SPDX-License-Identifier: Apache-2.0
"""Image files with random metadata, faulty metadata included, and files whose bytes are damaged."""

from __future__ import annotations

import io
import random
import struct
import zlib
from typing import Any

from PIL import Image

PICTURE = Image.new("RGB", (7, 4), "red")
XMP_PACKETS = (
    b'<x tiff:Orientation="6"/>',
    b"<tiff:Orientation>8</tiff:Orientation>",
    b'tiff:Orientation=6 tiff:Orientation="5"',
    b"<x/>",
)
RAW_PROFILE = b"Raw profile type exif\x00"
XMP_KEY = b"XML:com.adobe.xmp\x00"


def random_tiff(source: random.Random) -> bytes:
    """Return a TIFF file with up to four entries, orientations of any type and faulty entries among them."""
    order = source.choice("<>")
    signatures = [b"II*\x00", b"II\x00*", b"II"] if order == "<" else [b"MM\x00*", b"MM*\x00", b"MM"]
    entries = source.randint(0, 4)
    tiff = source.choice(signatures[:2] * 5 + signatures[2:])
    tiff += struct.pack(order + "LH", 8, entries + source.choice([0, 0, 0, 1]))
    for _ in range(entries):
        tag = source.choice([274, 274, 270, 271, 305])
        kind = source.choice([3, 3, 3, *range(19)])
        value = source.choice(
            [
                struct.pack(order + "HH", source.randint(0, 9), 0),
                struct.pack(order + "L", source.randint(0, 120)),
                struct.pack(order + "f", source.randint(0, 9)),
            ]
        )
        tiff += struct.pack(order + "HHL", tag, kind, source.choice([1, 1, 1, 0, 2, 5])) + value
    tiff += bytes(4)
    for _ in range(source.randint(0, 12)):
        tiff += struct.pack(order + source.choice("LHd"), source.randint(0, 9))
    return tiff[: source.choice([len(tiff)] * 6 + [source.randint(0, len(tiff))])]


def save(kind: str, picture: Image.Image = PICTURE, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def make_chunk(kind: bytes, content: bytes) -> bytes:
    """Return a chunk of PNG with its checksum."""
    return struct.pack(">L", len(content)) + kind + content + struct.pack(">L", zlib.crc32(kind + content))


def _random_chunk(source: random.Random) -> bytes:
    tiff, xmp = random_tiff(source), source.choice(XMP_PACKETS)
    profile = b"\nexif\n%8d\n%s\n" % (len(tiff), tiff.hex().encode())
    return make_chunk(
        *source.choice(
            [
                (b"eXIf", tiff),
                (b"tEXt", RAW_PROFILE + profile),
                (b"zTXt", RAW_PROFILE + b"\x00" + zlib.compress(profile)),
                (b"iTXt", XMP_KEY + bytes(4) + xmp),
                (b"iTXt", XMP_KEY + b"\x01\x00\x00\x00" + zlib.compress(xmp)),
                (b"iTXt", XMP_KEY + b"\x01\x01\x00\x00" + zlib.compress(xmp)),  # an unknown method
                (b"zTXt", XMP_KEY + b"\x00" + zlib.compress(xmp)),
                (b"zTXt", XMP_KEY + b"\x00" + xmp),  # not compressed
                (b"tEXt", b"exif\x00" + tiff),
            ]
        )
    )


def random_png(source: random.Random) -> bytes:
    """Return a PNG file with metadata before and after its image data."""
    content = save("PNG")
    before, after = (b"".join(_random_chunk(source) for _ in range(source.randint(0, 2))) for _ in range(2))
    return content[:33] + before + content[33:-12] + after + content[-12:]


def random_jpeg(source: random.Random) -> bytes:
    """Return a JPEG file with several segments of metadata and with bytes that belong to no segment."""
    content = save("JPEG", **({"dpi": (72, 72)} if source.random() < 0.3 else {}))
    segments = b""
    for _ in range(source.randint(0, 3)):
        tiff = random_tiff(source)
        body = source.choice(
            [
                b"Exif\x00\x00" + tiff,
                b"Exif\x00\x00Exif\x00\x00" + tiff,
                b"http://ns.adobe.com/xap/1.0/\x00" + source.choice(XMP_PACKETS),
            ]
        )
        segments += source.choice([b"", b"\xff", b"junk", b"\xff\x00"])
        segments += b"\xff\xe1" + struct.pack(">H", len(body) + 2) + body
    return content[:20] + segments + content[20:]


def random_webp(source: random.Random) -> bytes:
    """Return a still or animated WebP file."""
    options: dict[str, Any] = {"lossless": source.random() < 0.5}
    if source.random() < 0.6:
        options["exif"] = source.choice([b"", b"Exif\x00\x00"]) + random_tiff(source)
    if source.random() < 0.6:
        options["xmp"] = source.choice(XMP_PACKETS)
    if source.random() < 0.3:
        options |= {"save_all": True, "append_images": [PICTURE.rotate(90)]}
    return save("WEBP", **options)


def random_gif(source: random.Random) -> bytes:
    """Return a GIF file with extensions before its frame, some without data."""
    content = save("GIF", comment=b"c" * source.randint(1, 600))
    extensions = [
        b"!\xf9\x04\x00\x00\x00\x00\x00",
        b"!\xff\x0bNETSCAPE2.0\x03\x01\x00\x00\x00",
        b"!\x01\x00\x00",
    ]
    extensions += [b"!\xfe\x00", b"!\xfe\x02ab\x00", b"\x00", b"!\xff\x0bNETSCAPE2.0\x00\x00", b"junk"]
    start = 13 + (3 << (content[10] & 7) + 1 if content[10] & 0x80 else 0)
    added = b"".join(source.choice(extensions) for _ in range(source.randint(0, 3)))
    return content[:start] + added + content[start:]


def damage(content: bytes, source: random.Random) -> bytes:
    """Change up to three bytes near the beginning of a file; PNG keeps correct checksums."""
    damaged = bytearray(content)
    for _ in range(source.randint(1, 3)):
        place = source.randrange(min(len(damaged), source.choice([40, 120, 400])))
        damaged[place] = source.choice(
            [0, 255, source.randrange(256), damaged[place] ^ 1 << source.randrange(8)]
        )
    if source.random() < 0.1:
        del damaged[source.randrange(len(damaged)) :]
    if damaged.startswith(b"\x89PNG"):
        _repair_checksums(damaged)
    return bytes(damaged)


def _repair_checksums(content: bytearray) -> None:
    position = 8
    while position + 12 <= len(content):
        (length,) = struct.unpack_from(">L", content, position)
        end = position + 8 + length
        if end + 4 > len(content):
            return
        struct.pack_into(">L", content, end, zlib.crc32(content[position + 4 : end]))
        position = end + 4
