# SPDX-License-Identifier: Apache-2.0
"""Fetches from an S3 bucket that requires every request to be signed."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from mizzen.fetch.errors import CorruptDownload, FetchError
from mizzen.fetch.sigv4 import AccessKey, sign
from model_servers import Bucket

URI = "s3://models/llm/tiny"


@pytest.fixture
def login(tmp_path: Path) -> str:
    (tmp_path / "credentials").write_text(Bucket.PROFILE)
    return str(tmp_path / "credentials")


def fill(bucket: Any, model: dict[str, bytes], prefix: str = "llm/tiny/") -> None:
    bucket.objects |= {prefix + name: data for name, data in model.items()}
    bucket.objects |= {"llm/tiny-other/config.json": b"not ours", prefix: b""}


# From the S3 API reference, "Examples: Signature Calculations".
AWS = AccessKey("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")


@pytest.mark.parametrize(
    ("path", "headers", "signature"),
    [
        (
            "/test.txt",
            {"Range": "bytes=0-9"},
            "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
        ),
        ("/?lifecycle", {}, "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"),
        ("/?max-keys=2&prefix=J", {}, "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"),
    ],
)
def test_signatures_match_the_examples_of_the_specification(
    path: str, headers: dict[str, str], signature: str
) -> None:
    url, now = f"https://examplebucket.s3.amazonaws.com{path}", datetime(2013, 5, 24, tzinfo=UTC)
    signed = sign("GET", url, headers, AWS, "us-east-1", now)
    assert signed["Authorization"].endswith(f"Signature={signature}")


def test_a_model_is_fetched_completely_from_a_paged_listing(
    bucket: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, login: str
) -> None:
    model["sub/a b+c=ü.json"] = expected_files["sub/a b+c=ü.json"] = b"{}"
    fill(bucket, model)
    bucket.sha256.add("llm/tiny/tokenizer.json")
    first = fetch(URI, endpoint=bucket.server.url, credentials=login)
    assert fetched_files() == expected_files
    requests = len(bucket.server.requests)
    assert fetch(URI, endpoint=bucket.server.url, credentials=login) == first
    assert len(bucket.server.requests) == requests


def test_a_public_bucket_needs_no_key(
    bucket: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any
) -> None:
    fill(bucket, model)
    bucket.public = True
    fetch(URI, endpoint=bucket.server.url)
    assert fetched_files() == expected_files
    assert not any("Authorization" in headers for _, _, headers in bucket.server.requests)


def test_a_wrong_key_is_reported_without_the_secret(
    bucket: Any, fetch: Any, model: Any, tmp_path: Path
) -> None:
    fill(bucket, model)
    (tmp_path / "wrong").write_text(Bucket.PROFILE.replace("signs", "sighs"))
    with pytest.raises(FetchError, match="credentialsSecretRef") as error:
        fetch(URI, endpoint=bucket.server.url, credentials=str(tmp_path / "wrong"))
    assert "s3cr3t" not in str(error.value)
    (tmp_path / "wrong").write_text("aws_secret_access_key = s3cr3t")
    with pytest.raises(FetchError, match="aws_access_key_id") as error:
        fetch(URI, endpoint=bucket.server.url, credentials=str(tmp_path / "wrong"))
    assert "s3cr3t" not in str(error.value)


def test_disconnects_are_retried_with_signed_ranges(
    bucket: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, login: str
) -> None:
    fill(bucket, model)
    bucket.server.faults.cut_after, bucket.server.faults.cuts = 24_000, 5
    fetch(URI, endpoint=bucket.server.url, credentials=login)
    assert fetched_files() == expected_files and not bucket.server.faults.cuts


@pytest.mark.parametrize("checksum", ["sha256", "etag"])
def test_a_corrupt_object_is_detected(bucket: Any, fetch: Any, model: Any, login: str, checksum: str) -> None:
    fill(bucket, model)
    if checksum == "sha256":
        bucket.sha256 |= set(bucket.objects)
        bucket.parts |= set(bucket.objects)
    bucket.server.faults.wrong_bytes = 1000
    with pytest.raises(CorruptDownload, match="sha256:" if checksum == "sha256" else "md5:"):
        fetch(URI, endpoint=bucket.server.url, credentials=login)


@pytest.mark.parametrize("kind", ["parts", "encrypted"])
def test_an_etag_that_is_not_a_checksum_is_not_compared(
    bucket: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, login: str, kind: str
) -> None:
    fill(bucket, model)
    getattr(bucket, kind).update(bucket.objects)
    fetch(URI, endpoint=bucket.server.url, credentials=login)
    assert fetched_files() == expected_files


def test_an_object_that_changes_during_the_fetch_is_never_mixed(
    bucket: Any,
    fetch: Any,
    fetched_files: Any,
    model: Any,
    expected_files: Any,
    login: str,
    blob: Callable[..., bytes],
) -> None:
    fill(bucket, model)
    name = "model-00001-of-00002.safetensors"
    answer = bucket.server.answer

    def change(handler: Any) -> None:
        answer(handler)
        if handler.command == "GET" and handler.path.endswith(name):
            bucket.objects[f"llm/tiny/{name}"] = new

    new = blob(len(model[name]), 99)
    bucket.server.answer = change
    with pytest.raises(CorruptDownload, match="changed on the server"):
        fetch(URI, endpoint=bucket.server.url, credentials=login)
    fetch(URI, endpoint=bucket.server.url, credentials=login)
    assert fetched_files() == {**expected_files, name: new}


def test_an_object_deleted_before_a_retry_is_not_part_of_the_model(
    bucket: Any, fetch: Any, fetched_files: Any, model: Any, expected_files: Any, login: str
) -> None:
    fill(bucket, model)
    bucket.server.faults.codes = []
    bucket.server.faults.unsatisfiable = 1000
    with pytest.raises(FetchError):
        fetch(URI, endpoint=bucket.server.url, credentials=login)
    bucket.server.faults.unsatisfiable = 0
    deleted = "model-00002-of-00002.safetensors"
    del bucket.objects[f"llm/tiny/{deleted}"]
    fetch(URI, endpoint=bucket.server.url, credentials=login)
    assert fetched_files() == {name: data for name, data in expected_files.items() if name != deleted}


@pytest.mark.parametrize("uri", ["s3://missing/llm/tiny", "s3://models/nothing"])
def test_a_missing_bucket_or_prefix_is_reported(
    bucket: Any, fetch: Any, model: Any, login: str, uri: str
) -> None:
    fill(bucket, model)
    with pytest.raises(FetchError, match=r"no such bucket|no matching file"):
        fetch(uri, endpoint=bucket.server.url, credentials=login)
