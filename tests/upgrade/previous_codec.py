# SPDX-License-Identifier: Apache-2.0
"""Encodes and decodes messages with the code of a release, in a separate process.

As a program, it reads the frames to decode from standard input, as a JSON array of pairs: the receiver
(`engine` or `gateway`), and the frame in hexadecimal. It prints a JSON object:

- `encoded`: by tag and `filled` or `least`, the frame (`hex`) and the fields (`fields`) of each message.
- `block_hashes`: the hashes of the blocks of a prompt, by which gateways and engines name cached prefixes.
- `decoded`: for each given frame its `tag` and `fields`, or the `error`.

Fields are JSON values by name; bytes are hexadecimal.
"""

from __future__ import annotations

import json
import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from previous_release import Release


def run_codec(release: Release, frames: list[tuple[str, str]]) -> dict[str, Any]:
    """Return what this program prints when it runs with the code of a release."""
    done = subprocess.run(
        [sys.executable, "-P", __file__],
        input=json.dumps(frames),
        env=release.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(done.stderr)
    return json.loads(done.stdout)


def fields_of(message: Any) -> dict[str, Any]:
    """Return the fields of a message by name, as JSON values."""
    return {field: _plain(getattr(message, field)) for field in message.__struct_fields__}


def _plain(value: Any) -> Any:
    if hasattr(value, "__struct_fields__"):
        return fields_of(value)
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return value


def _hash_blocks() -> list[int]:
    import numpy as np

    try:
        from mizzen.core.kv.block_hashes import block_hashes
    except ModuleNotFoundError:  # its place in the release of version 2 of the protocol
        from mizzen.core.blocks import block_hashes  # pyright: ignore[reportMissingImports]
    return list(block_hashes(np.arange(200, dtype=np.int32), b"salt"))


def main() -> None:
    """Encode all messages of the release on the path, and decode the frames of standard input."""
    from message_samples import filled, least
    from mizzen.wire import codec, messages

    decoders = {"engine": codec.engine_decoder(), "gateway": codec.gateway_decoder()}
    encoded: dict[str, Any] = {}
    for union in (messages.ToEngine, messages.ToGateway):
        for kind in typing.get_args(union):
            encoded[kind.__struct_config__.tag] = {
                name: {"hex": codec.encode(message).hex(), "fields": fields_of(message)}
                for name, message in (("filled", filled(kind)), ("least", least(kind)))
            }
    decoded = []
    for receiver, frame in json.load(sys.stdin):
        try:
            message = decoders[receiver](bytes.fromhex(frame))
        except codec.MalformedFrame as error:
            decoded.append({"error": str(error)})
        else:
            decoded.append({"tag": message.__struct_config__.tag, "fields": fields_of(message)})
    print(json.dumps({"encoded": encoded, "block_hashes": _hash_blocks(), "decoded": decoded}))


if __name__ == "__main__":
    main()
