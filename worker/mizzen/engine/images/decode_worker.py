# SPDX-License-Identifier: Apache-2.0
"""The process that decodes images.

    python -P -m mizzen.engine.images.decode_worker --fd N --parent PID --memory-bytes N --pixels N

`mizzen.engine.images.decode_process` starts this process. It imports Pillow and the rules of the model, gives
up all rights that decoding does not need, and only then receives images.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pickle
import socket

import msgspec
import numpy as np

from mizzen.common.child_process import run_behind_parent, set_parent_death_signal
from mizzen.core.images.types import Pixels
from mizzen.engine.images.buffers import map_kept_pixels, map_pixels, read_content, view_pixels
from mizzen.engine.images.messages import MESSAGE_BYTES, DecodeJob, DecodeReady, DecodeReply
from mizzen.engine.images.sandbox import limit_resources, prefer_in_memory_shortage, restrict_system_calls
from mizzen.images.decode import decode_image, preload_decoders
from mizzen.images.types import ImageRules, InvalidImage, PixelLimits


def prepare(control: socket.socket, memory_bytes: int) -> ImageRules:
    """Read the rules of the model, confine this process, and report that it is ready."""
    try:
        rules: ImageRules = pickle.loads(control.recv(MESSAGE_BYTES))
        preload_decoders()
        prefer_in_memory_shortage()
        limit_resources(memory_bytes)
        confined = restrict_system_calls()
    except Exception as error:
        control.sendall(msgspec.json.encode(DecodeReady(fault=type(error).__name__)))
        raise
    control.sendall(msgspec.json.encode(DecodeReady(confined)))
    return rules


def serve(control: socket.socket, rules: ImageRules, kept_pixels: mmap.mmap) -> None:
    """Decode images until the engine closes its end of `control`.

    Pixels are written to `kept_pixels`, unless a job has a file for them.
    """
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, MESSAGE_BYTES, 2)
        if not message:
            return
        job = msgspec.json.decode(message, type=DecodeJob)
        content_file, *pixel_files = descriptors
        try:
            pixels = decode(job, rules, content_file)
            if pixel_files:
                target = map_pixels(pixel_files[0], job.shape, writable=True)
            else:
                target = view_pixels(kept_pixels, job.shape)
            np.copyto(target, pixels, casting="no")
            del pixels, target
            reply = DecodeReply()
        except InvalidImage as error:
            reply = DecodeReply(str(error))
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        control.sendall(msgspec.json.encode(reply))


def decode(job: DecodeJob, rules: ImageRules, content_file: int) -> Pixels:
    """Return the pixels of the image in `content_file`, uint8 [tiles, height, width, 3].

    Raises:
        InvalidImage: the image cannot be decoded.
    """
    limits = PixelLimits(job.min_pixels, job.max_pixels)
    return decode_image(read_content(content_file, job.content_bytes), rules, job.header_size, limits)


def main() -> None:
    """Run the process."""
    parser = argparse.ArgumentParser(description="decodes images; started by the engine")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--pixels", type=int, required=True)
    args = parser.parse_args()
    set_parent_death_signal(args.parent)
    run_behind_parent()
    kept_pixels = map_kept_pixels(args.pixels, writable=True)
    os.close(args.pixels)
    with socket.socket(fileno=args.fd) as control:
        try:
            serve(control, prepare(control, args.memory_bytes), kept_pixels)
        except ConnectionError:
            pass  # the engine is gone


if __name__ == "__main__":
    main()
