# SPDX-License-Identifier: Apache-2.0
"""Paths, file filters, journals, progress and option values of fetches, for arbitrary input."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mizzen.fetch.config import FetchConfig
from mizzen.fetch.errors import FetchError
from mizzen.fetch.partial_file import PartialFile
from mizzen.fetch.plan import FileFilter, RemoteFile, check_collisions, check_path
from mizzen.fetch.progress import FetchProgress
from mizzen.fetch.source import HubSource, OciSource, S3Source, parse_source

PARTS = st.sampled_from(
    ["a", "b.json", "..", ".", "", "\\", "\0", "~", "c:", ".mizzen.json", "x" * 300, "ü", " "]
)
PATHS = st.one_of(st.text(max_size=60), st.lists(PARTS, max_size=6).map("/".join))


@given(PATHS)
def test_an_accepted_path_stays_in_its_folder(path: str) -> None:
    try:
        accepted = check_path(path)
    except FetchError:
        return
    root = "/srv/models/one"
    place = os.path.normpath(os.path.join(root, accepted))
    assert accepted == path and place == f"{root}/{path}"
    assert "\0" not in accepted and not accepted.startswith(".mizzen")


@given(st.lists(st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join), max_size=6))
def test_accepted_paths_do_not_collide(paths: list[str]) -> None:
    try:
        check_collisions(paths)
    except FetchError:
        clash = len(set(paths)) < len(paths) or any(b.startswith(f"{a}/") for a in paths for b in paths)
        assert clash
        return
    assert len(set(paths)) == len(paths)
    assert not any(b.startswith(f"{a}/") for a in paths for b in paths)


@pytest.mark.parametrize(
    ("uri", "source"),
    [
        ("hf://Qwen/Qwen3-8B", HubSource("Qwen/Qwen3-8B", "main")),
        ("hf://gpt2@refs/pr/1", HubSource("gpt2", "refs/pr/1")),
        ("s3://weights", S3Source("weights", "")),
        ("s3://weights/a/b/", S3Source("weights", "a/b/")),
        ("oci://ghcr.io/a/b", OciSource("ghcr.io", "a/b", "latest")),
        ("oci://h:5000/a:v1", OciSource("h:5000", "a", "v1")),
        (f"oci://h/a:v1@sha256:{'0' * 64}", OciSource("h", "a", f"sha256:{'0' * 64}")),
    ],
)
def test_source_uris_are_parsed(uri: str, source: object) -> None:
    assert parse_source(uri) == source


@pytest.mark.parametrize(
    "uri", ["", "hf://", "hf://a/b/c", "hf://a/../b", "hf://a@..", "s3://A", "http://h/a", "oci://h"]
)
def test_an_invalid_source_uri_is_rejected(uri: str) -> None:
    with pytest.raises(FetchError, match="is not a source"):
        parse_source(uri)


def test_the_default_filter_excludes_code_and_second_copies() -> None:
    file_filter = FileFilter()
    assert all(
        file_filter.matches(name)
        for name in ("model.safetensors", "sub/tokenizer.model", "chat_template.jinja")
    )
    refused = (
        "a.bin",
        "a.pt",
        "modeling.py",
        "original/a.safetensors",
        "consolidated.safetensors",
        ".x/a.json",
    )
    assert not any(file_filter.matches(name) for name in refused)


NOTES = st.lists(
    st.one_of(
        st.tuples(st.integers(-5, 40), st.integers(-5, 40)).map(lambda pair: f"{pair[0]} {pair[1]}"),
        st.sampled_from(["", "1", "a b", "0 9999999999999", "0 3 4"]),
    ),
    max_size=8,
)


@given(NOTES, st.integers(0, 40), st.integers(0, 40))
@example(["8 0"], 8, 8)
def test_a_loaded_journal_never_exceeds_the_data(
    tmp_path_factory: pytest.TempPathFactory, notes: list[str], size: int, data_size: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "notes"
    folder.mkdir(exist_ok=True)
    partial = PartialFile(RemoteFile("a", size, "", "http://h/a"), folder / "a", segment=8)
    partial.data.write_bytes(bytes(data_size))
    partial.journal.write_text("\n".join(notes))
    partial.load_journal()
    for start, count in partial.received.items():
        assert start in range(0, max(size, 1), 8) and 0 <= count <= partial.segment_end(start) - start
        assert start + count <= data_size


@given(st.lists(st.tuples(st.floats(0.01, 20), st.integers(0, 10**9)), min_size=1, max_size=30))
def test_progress_counts_all_bytes(steps: list[tuple[float, int]]) -> None:
    clock = [0.0]
    progress, total = FetchProgress(lambda: clock[0]), sum(count for _, count in steps) + 1
    progress.start_counting("r", total + 5, 5)
    for seconds, count in steps:
        clock[0] += seconds
        progress.add_bytes(count)
        shown = progress.snapshot()
        assert 5 <= shown["fetchedBytes"] <= shown["totalBytes"]
        if "secondsLeft" in shown:
            left = shown["totalBytes"] - shown["fetchedBytes"]
            assert shown["secondsLeft"] * shown["bytesPerSecond"] >= left
    assert shown["fetchedBytes"] == total + 4


@pytest.mark.parametrize("endpoint", ["ftp://h", "hub.example.com", "https://user:word@h", "https://"])
def test_an_invalid_endpoint_is_rejected(endpoint: str) -> None:
    with pytest.raises(ValueError, match="--endpoint"):
        FetchConfig(endpoint=endpoint)


def test_an_invalid_size_or_digest_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(FetchError):
        RemoteFile("a", -1, "", "http://h")
    with pytest.raises(FetchError):
        RemoteFile("a", 1, "crc:0", "http://h")
