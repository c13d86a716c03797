# SPDX-License-Identifier: Apache-2.0
"""Run a fetch, from its options to its exit code. `mizzen fetch` calls `run_fetch`."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Collection, Mapping
from pathlib import Path
from types import FrameType

from mizzen.fetch import hub, oci, s3
from mizzen.fetch.client import Credentials, FetchClient, RateLimiter
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.digests import sha256
from mizzen.fetch.download import CHECKPOINT, SEGMENT, Downloader
from mizzen.fetch.environment import read_hub_token, use_hub_endpoint
from mizzen.fetch.errors import FetchError, FetchStopped
from mizzen.fetch.plan import EXCLUDE, INCLUDE, FetchPlan, FileFilter, Listing, check_collisions
from mizzen.fetch.progress import FetchProgress
from mizzen.fetch.report import serve_progress, write_termination_message
from mizzen.fetch.source import HubSource, OciSource, S3Source, Source, parse_source
from mizzen.fetch.store import Manifest, ManifestEntry, ModelFolder, filesystem_error
from mizzen.fetch.unpack import unpack

logger = logging.getLogger(__name__)
LOG_SECONDS = 10.0


class Fetch:
    """Fetch of one source into one model folder."""

    def __init__(
        self,
        uri: str,
        folder: Path,
        config: FetchConfig,
        *,
        stop: threading.Event | None = None,
        segment: int = SEGMENT,
        checkpoint: int = CHECKPOINT,
    ) -> None:
        """Prepare a fetch.

        Args:
            uri: URI of the source.
            folder: folder of the model.
            config: options of the fetch.
            stop: event that stops the fetch once it is set.
            segment: number of bytes that one connection downloads per request.
            checkpoint: number of bytes per connection that may be lost if the process is killed.

        Raises:
            FetchError: the URI or `HF_ENDPOINT` is invalid.
        """
        self.progress = FetchProgress()
        self._source: Source = parse_source(uri)
        is_hub = isinstance(self._source, HubSource)
        self._uri, self._config = uri, use_hub_endpoint(config) if is_hub else config
        self._store = ModelFolder(folder)
        self._file_filter = FileFilter(
            config.include or INCLUDE, (*config.exclude, *(() if config.include else EXCLUDE))
        )
        self._stop = stop or threading.Event()
        self._segment, self._checkpoint = segment, checkpoint
        self._client = FetchClient(
            timeout=config.timeout_seconds,
            attempts=config.attempts,
            connections=config.connections,
            stop=self._stop,
            on_retry=self._on_retry,
        )

    def run(self) -> Manifest:
        """Fetch the files that are missing from the folder, and return the folder's manifest.

        If the folder is complete, no request is sent.

        Raises:
            FetchError: the fetch failed; the data received so far is kept.
        """
        try:
            self._store.create()
            with self._store.lock(
                self._config.lock_seconds, self._client.raise_if_stopped, self._on_lock_wait
            ):
                return self._fetch_locked()
        except OSError as error:
            raise filesystem_error(error, self._store.folder) from error
        finally:
            self._client.close()

    def peek(self, names: Collection[str]) -> Listing:
        """List the files of the source, and read those of them that `names` lists; nothing is written.

        Raises:
            FetchError: the source cannot be listed or read.
        """
        try:
            credentials = self._credentials()
            plan = self._plan(credentials, self._config.pin)
            contents = {
                file.path: self._client.get(file.url, credentials).content
                for file in plan.files
                if file.path in names and file.unpack is None
            }
            return Listing({file.path: file.size for file in plan.files}, contents)
        finally:
            self._client.close()

    def _on_lock_wait(self) -> None:
        self.progress.enter_phase("waiting", "another fetch into this folder is running")
        logger.info("another fetch into %s is running: waiting until it ends", self._store.folder)

    def _on_retry(self, text: str) -> None:
        logger.warning("%s", text)
        self.progress.report_retry(text)

    def _fetch_locked(self) -> Manifest:
        pin, endpoint = self._config.pin, self._config.endpoint
        complete = self._store.read_complete(self._uri, endpoint)
        if complete is not None and pin in ("", complete.revision):
            self._store.remove_subfolder(oci.BLOBS)
            self.progress.start_counting(complete.revision, complete.size, complete.size)
            self.progress.enter_phase("complete", "already present")
            return complete
        self.progress.enter_phase("planning")
        credentials = self._credentials()
        plan = self._plan(credentials, pin or self._store.planned_revision(self._uri))
        self._store.save_plan(self._uri, plan)
        loader = Downloader(
            self._client,
            credentials,
            self._store,
            self.progress,
            connections=self._config.connections,
            limiter=RateLimiter(self._config.max_rate, self._stop),
            segment=self._segment,
            checkpoint=self._checkpoint,
        )
        partials = loader.open_partials(plan.files)
        present_bytes = sum(partial.received_bytes for partial in partials)
        self._store.check_space(plan.size - present_bytes)
        self.progress.start_counting(plan.revision, plan.size, present_bytes)
        self.progress.enter_phase("downloading")
        digests = loader.download(partials)
        manifest = Manifest(self._uri, endpoint, plan.revision, self._collect_entries(plan, digests))
        self._store.mark_complete(manifest)
        self._store.remove_subfolder(oci.BLOBS)
        self.progress.enter_phase("complete")
        return manifest

    def _credentials(self) -> Credentials:
        text = read_hub_token(self._config) if isinstance(self._source, HubSource) else ""
        if self._config.credentials:
            try:
                text = Path(self._config.credentials).read_text()
            except (OSError, ValueError) as error:
                raise FetchError(
                    f"--credentials {self._config.credentials} cannot be read: {error}"
                ) from error
        if isinstance(self._source, HubSource):
            return hub.parse_credentials(text)
        if isinstance(self._source, S3Source):
            return s3.parse_credentials(text, self._config.region)
        return oci.parse_credentials(text, self._source, self._config.endpoint)

    def _plan(self, credentials: Credentials, pin: str) -> FetchPlan:
        endpoint, limit = self._config.endpoint, self._config.max_bytes
        if isinstance(self._source, HubSource):
            return hub.plan_fetch(
                self._client,
                self._source,
                credentials,
                self._file_filter,
                endpoint=endpoint,
                pin=pin,
                limit=limit,
            )
        if isinstance(self._source, S3Source) and isinstance(credentials, s3.Signer):
            plan = s3.plan_fetch(
                self._client, self._source, credentials, self._file_filter, endpoint=endpoint, limit=limit
            )
            if self._config.pin and plan.revision != self._config.pin:
                raise FetchError(
                    f"{self._uri} no longer matches {self._config.pin}: store a new model under a new prefix"
                )
            return plan
        if isinstance(self._source, OciSource) and isinstance(credentials, oci.RegistryLogin):
            return oci.plan_fetch(
                self._client,
                self._source,
                credentials,
                self._file_filter,
                endpoint=endpoint,
                pin=pin,
                limit=limit,
            )
        raise FetchError(f"{self._uri}: no fetcher for this source")

    def _collect_entries(self, plan: FetchPlan, digests: Mapping[str, str]) -> tuple[ManifestEntry, ...]:
        """Unpack the plan's archives, and return a manifest entry for each file, sorted by path.

        `digests` maps the path of each downloaded file to its SHA-256.
        """
        archives = [file for file in plan.files if file.unpack is not None]
        entries = {
            f.path: ManifestEntry(f.path, f.size, digests[f.path]) for f in plan.files if f.unpack is None
        }
        if archives:
            self.progress.enter_phase("unpacking")
        for file in archives:
            archive = self._store.path_of(file.path)
            sizes = unpack(
                archive,
                file.unpack or "",
                self._store,
                self._file_filter,
                limit=self._config.max_bytes,
                check=self._client.raise_if_stopped,
            )
            for path, size in sizes.items():
                digest = sha256(self._store.path_of(path), self._client.raise_if_stopped)
                entries[path] = ManifestEntry(path, size, digest)
        if not entries:
            raise FetchError(f"{self._uri} has no matching file: check its name and --include")
        check_collisions(entries)
        return tuple(entries[path] for path in sorted(entries))


def run_fetch(uri: str, folder: Path, config: FetchConfig) -> int:
    """Fetch a model, report the result, and return the exit code.

    The code is 0 if the folder is complete, 1 if the fetch failed, 2 if the URI is invalid, and 128 + n if
    signal n stopped the fetch. The log and the termination message contain the reason. Another run resumes a
    fetch that failed or was stopped.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(
        logging.WARNING
    )  # httpx logs URLs, and URLs of redirects may contain signatures
    stop, signals = threading.Event(), list[int]()

    def on_signal(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        fetch = Fetch(uri, folder, config, stop=stop)
    except FetchError as error:
        logger.error("%s", error)
        write_termination_message(config.termination_message, str(error))
        return 2
    try:
        with (
            serve_progress(fetch.progress, config.progress_host, config.progress_port),
            _ProgressLogger(fetch.progress),
        ):
            manifest = fetch.run()
    except FetchStopped as error:
        logger.info("%s", error)
        write_termination_message(config.termination_message, str(error))
        return 128 + signals[0] if signals else 1
    except (FetchError, OSError) as error:
        logger.error("%s", error)
        write_termination_message(config.termination_message, str(error))
        return 1
    from mizzen.inspection.sizes import read_sizes

    result = {
        "revision": manifest.revision,
        "bytes": manifest.size,
        "files": len(manifest.files),
        **read_sizes(folder),
    }
    logger.info("%s is complete: %s", folder, json.dumps(result))
    write_termination_message(config.termination_message, json.dumps(result))
    return 0


class _ProgressLogger:
    """Context manager that logs the progress of a fetch every `LOG_SECONDS`."""

    def __init__(self, progress: FetchProgress) -> None:
        self._progress = progress
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._end.wait(LOG_SECONDS):
            progress = json.dumps(self._progress.snapshot())
            logger.info("progress after %.0f s: %s", time.monotonic() - began, progress)
