# SPDX-License-Identifier: Apache-2.0
"""Writes a model folder without weights: the config.json of a benchmark's shape, and a tokenizer.

    python benchmarks/shape_folder.py --shape qwen3-8b FOLDER
    mizzen serve FOLDER --load-format dummy

The tokenizer has 128,000 entries and is trained on invented words, which takes a few seconds. Shapes with a
smaller vocabulary are rejected, because the engine rejects token ids beyond the vocabulary.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from common_parts.arguments import Help
from common_parts.shapes import SHAPES
from gateway_parts.vocabulary import SIZE, Vocabulary


def write_folder(shape: str, folder: Path) -> None:
    """Write the config.json of a shape and the tokenizer's files to a folder; create it if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[shape], indent=2))
    for name, content in Vocabulary().files.items():
        (folder / name).write_bytes(content)


def main() -> None:
    """Write the folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=Help)
    served = sorted(name for name, config in SHAPES.items() if config["vocab_size"] >= SIZE)
    parser.add_argument("--shape", choices=served, default="qwen3-8b", help="shape of the model")
    parser.add_argument("folder", type=Path, help="folder to write")
    args = parser.parse_args()
    write_folder(args.shape, args.folder)
    print(f"{args.folder}: shape of {args.shape}, tokenizer with {SIZE} entries")


if __name__ == "__main__":
    main()
