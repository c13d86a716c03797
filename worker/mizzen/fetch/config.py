"""Everything that a fetch can be told, in one frozen object."""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from mizzen.core.options import check, option


@dataclass(frozen=True, slots=True, kw_only=True)
class FetchConfig:
    """Options of `mizzen fetch`; each field is an option of the same name."""

    endpoint: str = option(
        "", "Base URL in place of the public hub's (hf), Amazon's (s3) or the registry's own (oci)"
    )
    region: str = option("", "Region of s3; without it the credentials file's, else us-east-1")
    credentials: str | None = option(
        None, "File with a token (hf), a credentials file of AWS (s3), or a config.json of Docker (oci)"
    )
    pin: str = option("", "Revision to take in place of the one that the source's branch or tag has now")
    include: tuple[str, ...] = option(
        (), "Pattern of files to take, in place of safetensors, JSON, templates and tokenizers; repeatable"
    )
    exclude: tuple[str, ...] = option((), "Pattern of files to leave out; repeatable")
    connections: int = option(8, "Downloads at once", low=1, high=64)
    max_rate: int = option(0, "Bytes a second at most; 0 is no limit", low=0)
    max_bytes: int = option(0, "Refuse a model of more bytes; 0 is no limit", low=0)
    timeout_seconds: float = option(30.0, "A server that is silent this long counts as failed", low=0.1)
    attempts: int = option(8, "Tries in a row that bring not one byte, before the fetch fails", low=1)
    lock_seconds: float = option(86400.0, "How long to wait for another fetch into the same folder", low=0)
    progress_host: str = option("127.0.0.1", "Address of /progress and /healthz")
    progress_port: int = option(-1, "Port of /progress and /healthz; -1 is none", low=-1, high=65535)
    termination_message: str = option(
        "/dev/termination-log", "File that gets the result or the reason of a failure, where it exists"
    )

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ValueError: names the option and what would be right.
        """
        check(self)
        url = urlsplit(self.endpoint)
        if self.endpoint and (url.scheme not in ("http", "https") or not url.hostname or url.query):
            raise ValueError(
                f"--endpoint must be a URL such as https://hub.example.com, not {self.endpoint!r}"
            )
        if url.username or url.password:
            raise ValueError("--endpoint must not hold a password: use --credentials")
