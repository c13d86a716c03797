"""One fetch from its options to its exit code."""

from __future__ import annotations

import json
import logging
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from mizzen.fetch import hub, oci, s3
from mizzen.fetch.client import Client, Credentials, Pace
from mizzen.fetch.config import FetchConfig
from mizzen.fetch.digests import sha256
from mizzen.fetch.download import CHECKPOINT, SEGMENT, Downloader
from mizzen.fetch.errors import FetchError, Stopped
from mizzen.fetch.plan import EXCLUDE, INCLUDE, Choice, Plan, collide
from mizzen.fetch.progress import Progress
from mizzen.fetch.report import served, terminate
from mizzen.fetch.source import HubSource, OciSource, S3Source, Source, parse
from mizzen.fetch.store import Entry, Manifest, Store, failed
from mizzen.fetch.unpack import unpack

logger = logging.getLogger(__name__)
LOG_SECONDS = 10.0


class Fetch:
    """Brings one source into one folder."""

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
            uri: of the source.
            folder: where the files go.
            config: how.
            stop: ends it as soon as it is set.
            segment: bytes that one connection gets in one go.
            checkpoint: bytes of a connection that a killed process may lose.

        Raises:
            FetchError: the URI or the credentials are not right.
        """
        self.progress = Progress()
        self._uri, self._config = uri, config
        self._source: Source = parse(uri)
        self._store = Store(folder)
        self._choice = Choice(
            config.include or INCLUDE, (*config.exclude, *(() if config.include else EXCLUDE))
        )
        self._stop = stop or threading.Event()
        self._segment, self._checkpoint = segment, checkpoint
        self._client = Client(
            timeout=config.timeout_seconds,
            attempts=config.attempts,
            connections=config.connections,
            stop=self._stop,
            on_trouble=self._trouble,
        )

    def run(self) -> Manifest:
        """Fetch what is missing; nothing when the folder is whole.

        Raises:
            FetchError: it cannot go on; what came so far stays.
        """
        try:
            self._store.make()
            with self._store.lock(self._config.lock_seconds, self._client.check, self._waits):
                return self._locked()
        except OSError as error:
            raise failed(error, self._store.folder) from error
        finally:
            self._client.close()

    def _waits(self) -> None:
        self.progress.phase("waiting", "another fetch into this folder is under way")
        logger.info("another fetch into %s is under way: waiting for it", self._store.folder)

    def _trouble(self, text: str) -> None:
        logger.warning("%s", text)
        self.progress.trouble(text)

    def _locked(self) -> Manifest:
        pin, endpoint = self._config.pin, self._config.endpoint
        there = self._store.whole(self._uri, endpoint)
        if there is not None and pin in ("", there.revision):
            self._store.clear(oci.BLOBS)
            self.progress.begin(there.revision, there.size, there.size)
            self.progress.phase("complete", "it was there already")
            return there
        self.progress.phase("planning")
        shows = self._credentials()
        plan = self._plan(shows, pin or self._store.pinned(self._uri))
        self._store.begin(self._uri, plan)
        loader = Downloader(
            self._client,
            shows,
            self._store,
            self.progress,
            connections=self._config.connections,
            pace=Pace(self._config.max_rate, self._stop),
            segment=self._segment,
            checkpoint=self._checkpoint,
        )
        partials = loader.prepare(plan.files)
        there_bytes = sum(partial.done for partial in partials)
        self._store.room(plan.size - there_bytes)
        self.progress.begin(plan.revision, plan.size, there_bytes)
        self.progress.phase("downloading")
        digests = loader.run(partials)
        manifest = Manifest(self._uri, endpoint, plan.revision, self._entries(plan, digests))
        self._store.finish(manifest)
        self._store.clear(oci.BLOBS)
        self.progress.phase("complete")
        return manifest

    def _credentials(self) -> Credentials:
        text = ""
        if self._config.credentials:
            try:
                text = Path(self._config.credentials).read_text()
            except (OSError, ValueError) as error:
                raise FetchError(
                    f"--credentials {self._config.credentials} cannot be read: {error}"
                ) from error
        if isinstance(self._source, HubSource):
            return hub.credentials(text)
        if isinstance(self._source, S3Source):
            return s3.credentials(text, self._config.region)
        return oci.credentials(text, self._source, self._config.endpoint)

    def _plan(self, shows: Credentials, pin: str) -> Plan:
        endpoint, limit = self._config.endpoint, self._config.max_bytes
        if isinstance(self._source, HubSource):
            return hub.plan(
                self._client, self._source, shows, self._choice, endpoint=endpoint, pin=pin, limit=limit
            )
        if isinstance(self._source, S3Source) and isinstance(shows, s3.Signer):
            plan = s3.plan(self._client, self._source, shows, self._choice, endpoint=endpoint, limit=limit)
            if self._config.pin and plan.revision != self._config.pin:
                raise FetchError(
                    f"{self._uri} is not {self._config.pin} any more: put a new model below a new prefix"
                )
            return plan
        if isinstance(self._source, OciSource) and isinstance(shows, oci.RegistryLogin):
            return oci.plan(
                self._client, self._source, shows, self._choice, endpoint=endpoint, pin=pin, limit=limit
            )
        raise FetchError(f"{self._uri}: nothing here fetches it")

    def _entries(self, plan: Plan, digests: Mapping[str, str]) -> tuple[Entry, ...]:
        """What the folder holds in the end: plain files, and those of archives, which go."""
        archives = [file for file in plan.files if file.unpack is not None]
        entries = {f.path: Entry(f.path, f.size, digests[f.path]) for f in plan.files if f.unpack is None}
        if archives:
            self.progress.phase("unpacking")
        for file in archives:
            place = self._store.place(file.path)
            sizes = unpack(
                place,
                file.unpack or "",
                self._store,
                self._choice,
                limit=self._config.max_bytes,
                check=self._client.check,
            )
            for path, size in sizes.items():
                digest = sha256(self._store.place(path), self._client.check)
                entries[path] = Entry(path, size, digest)
        if not entries:
            raise FetchError(f"{self._uri} has no file that is wanted: look at its name, and at --include")
        collide(entries)
        return tuple(entries[path] for path in sorted(entries))


def run(uri: str, folder: Path, config: FetchConfig) -> int:
    """Fetch, and say how it went; returns the exit code.

    0: the folder is whole. 1: it failed, and the reason is in the log and the termination message; another
    try goes on where this one ended. 2: the options are not right. 128 + n: signal n ended it.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(
        logging.WARNING
    )  # it logs URLs, and those of redirects hold signatures
    stop, signals = threading.Event(), list[int]()

    def ended(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ended)
    try:
        fetch = Fetch(uri, folder, config, stop=stop)
    except FetchError as error:
        logger.error("%s", error)
        terminate(config.termination_message, str(error))
        return 2
    try:
        with served(fetch.progress, config.progress_host, config.progress_port), _logged(fetch.progress):
            manifest = fetch.run()
    except Stopped as error:
        logger.info("%s", error)
        terminate(config.termination_message, str(error))
        return 128 + signals[0] if signals else 1
    except (FetchError, OSError) as error:
        logger.error("%s", error)
        terminate(config.termination_message, str(error))
        return 1
    result = {"revision": manifest.revision, "bytes": manifest.size, "files": len(manifest.files)}
    logger.info("%s is whole: %s", folder, json.dumps(result))
    terminate(config.termination_message, json.dumps(result))
    return 0


class _logged:
    """Logs the progress once in a while as long as a block runs."""

    def __init__(self, progress: Progress) -> None:
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
            now = self._progress.snapshot()
            logger.info("%s after %.0f s", json.dumps(now), time.monotonic() - began)
