# SPDX-License-Identifier: Apache-2.0
"""Configuration of a fetch, as one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from mizzen.common.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Options of `mizzen fetch`; each field is the option of the same name."""

    endpoint: str = option(
        "", "Base URL to use instead of the public hub (hf), Amazon S3 (s3) or the registry's address (oci)"
    )
    region: str = option(
        "", "Region of the bucket (s3); by default the one in the credentials file, or else us-east-1"
    )
    credentials: str | None = option(
        None, "File with a token (hf), AWS credentials (s3) or a Docker config.json (oci)"
    )
    pin: str = option("", "Revision to fetch instead of the one that the source's branch or tag names")
    include: tuple[str, ...] = option(
        (), "Pattern of files to fetch, instead of safetensors, JSON, templates and tokenizers; repeatable"
    )
    exclude: tuple[str, ...] = option((), "Pattern of files to skip; repeatable")
    connections: int = option(8, "Number of concurrent downloads", low=1, high=64)
    max_rate: int = option(0, "Maximum download rate in bytes per second; 0 is no limit", low=0)
    max_bytes: int = option(0, "Maximum size of the model in bytes; 0 is no limit", low=0)
    timeout_seconds: float = option(30.0, "Time without data after which a server counts as failed", low=0.1)
    attempts: int = option(
        8, "Number of consecutive tries without a single new byte after which the fetch fails", low=1
    )
    lock_seconds: float = option(86400.0, "Time to wait for another fetch into the same folder", low=0)
    progress_host: str = option("127.0.0.1", "Address of /progress and /healthz")
    progress_port: int = option(-1, "Port of /progress and /healthz; -1 disables them", low=-1, high=65535)
    termination_message: str = option(
        "/dev/termination-log", "File for the result or the reason of a failure, if its folder exists"
    )

    def __post_init__(self) -> None:
        """Check the values of all fields.

        Raises:
            ValueError: a value is invalid; the message names the option and the allowed values.
        """
        check(self)
        url = urlsplit(self.endpoint)
        if self.endpoint and (url.scheme not in ("http", "https") or not url.hostname or url.query):
            raise ValueError(
                f"--endpoint must be a URL such as https://hub.example.com, not {self.endpoint!r}"
            )
        if url.username or url.password:
            raise ValueError("--endpoint must not contain a password: use --credentials")
