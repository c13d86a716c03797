# SPDX-License-Identifier: Apache-2.0
"""Extract files from tar archives; reject links, devices and paths that lead out of the model folder."""

from __future__ import annotations

import lzma
import os
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from mizzen.fetch.errors import CorruptDownload, FetchError
from mizzen.fetch.plan import MAX_FILES, FileFilter, check_path
from mizzen.fetch.store import ModelFolder, filesystem_error

_COPY = 4 * 1024 * 1024


def unpack(
    archive: Path,
    folder: str,
    store: ModelFolder,
    file_filter: FileFilter,
    *,
    limit: int,
    check: Callable[[], None],
) -> dict[str, int]:
    """Extract the selected files of a tar archive, and return their sizes in bytes by path.

    Args:
        archive: path of the archive, which may be compressed.
        folder: folder in the archive whose contents are extracted; empty for the whole archive.
        store: model folder to extract to; a file gets its final name only once it is complete.
        file_filter: selects the files, by their paths in `store`.
        limit: maximum total size of the extracted files in bytes; 0 means no limit.
        check: called regularly; may raise to stop.

    Raises:
        FetchError: the archive is corrupt, contains unsafe entries, or exceeds `limit`.
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
                path = _path_in_folder(member.name, folder)
                if not path or not file_filter.matches(path) or member.isdir():
                    continue
                check_path(path)
                if not member.isreg():
                    raise FetchError(
                        f"an archive contains {path!r} as a link or device: only plain files are allowed"
                    )
                total += member.size
                if limit and total > limit:
                    raise FetchError(f"an archive contains more than --max-bytes {limit}")
                _extract(tar, member, store.path_of(path), store, check)
                sizes[path] = member.size
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise CorruptDownload(f"an archive cannot be read: {error}") from error
    except OSError as error:
        raise filesystem_error(error, archive) from error
    return sizes


def _path_in_folder(name: str, folder: str) -> str:
    """Return a member's path relative to `folder`; empty if the member is not in the folder."""
    name = name.removeprefix("./").lstrip("/")
    if not folder:
        return name
    return name.removeprefix(f"{folder}/") if name.startswith(f"{folder}/") else ""


def _extract(
    tar: tarfile.TarFile, member: tarfile.TarInfo, target: Path, store: ModelFolder, check: Callable[[], None]
) -> None:
    store.check_space(member.size)
    source = tar.extractfile(member)
    if source is None:
        raise CorruptDownload(f"an archive has no data for {member.name!r}")
    partial = target.with_name(f"{target.name}.partial")
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
    with source, os.fdopen(descriptor, "wb") as output:
        while block := source.read(_COPY):
            check()
            output.write(block)
    partial.replace(target)
