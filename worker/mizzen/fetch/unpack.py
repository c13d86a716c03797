"""Takes wanted files out of archives: no links, no devices, no path that leads elsewhere."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from mizzen.fetch.errors import Corrupt, FetchError
from mizzen.fetch.plan import MAX_FILES, Choice, safe
from mizzen.fetch.store import Store, failed

_COPY = 4 * 1024 * 1024


def unpack(
    archive: Path,
    folder: str,
    store: Store,
    choice: Choice,
    *,
    limit: int,
    check: Callable[[], None],
) -> dict[str, int]:
    """Unpack the wanted files below a folder of a tar archive, gzipped or not; returns their sizes by path.

    Args:
        archive: the file.
        folder: in the archive; its own name is no part of the paths. The whole archive when empty.
        store: where the files go, each under its name at once when it is whole.
        choice: of the files.
        limit: bytes at most; 0 is none.
        check: called once in a while; may raise.

    Raises:
        FetchError: the archive is broken, holds what is not safe, or too much.
    """
    sizes: dict[str, int] = {}
    seen = total = 0
    try:
        with tarfile.open(archive, "r:*") as tar:
            for member in tar:
                check()
                seen += 1
                if seen > 10 * MAX_FILES:
                    raise FetchError(f"an archive has more than {10 * MAX_FILES} entries")
                path = _inside(member.name, folder)
                if not path or not choice.takes(path) or member.isdir():
                    continue
                safe(path)
                if not member.isreg():
                    raise FetchError(
                        f"an archive holds {path!r} as a link or device: only plain files are taken"
                    )
                total += member.size
                if limit and total > limit:
                    raise FetchError(f"an archive has more than --max-bytes {limit}")
                _copy(tar, member, store.place(path), store, check)
                sizes[path] = member.size
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise Corrupt(f"an archive cannot be read: {error}") from error
    except OSError as error:
        raise failed(error, archive) from error
    return sizes


def _inside(name: str, folder: str) -> str:
    """The path of a member below a folder; empty when it is elsewhere."""
    name = name.removeprefix("./").lstrip("/")
    if not folder:
        return name
    return name.removeprefix(f"{folder}/") if name.startswith(f"{folder}/") else ""


def _copy(
    tar: tarfile.TarFile, member: tarfile.TarInfo, place: Path, store: Store, check: Callable[[], None]
) -> None:
    store.room(member.size)
    source = tar.extractfile(member)
    if source is None:
        raise Corrupt(f"an archive has no data of {member.name!r}")
    partial = place.with_name(f"{place.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with source, os.fdopen(descriptor, "wb") as target:
        while block := source.read(_COPY):
            check()
            target.write(block)
    partial.replace(place)
