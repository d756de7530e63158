"""Laying out an entry's files under their real names, for loaders that open them in place."""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import gettempdir, mkdtemp

from neffbuild.cache import files, filesystem
from neffbuild.cache.canonical import digest_document
from neffbuild.cache.catalog import quarantine_entry
from neffbuild.cache.directory import DirectoryStore
from neffbuild.cache.entry import Entry, FileRecord
from neffbuild.config.errors import IntegrityError, StoreError

_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR})
_ATTEMPTS = 5
_private_folders: dict[int, Path] = {}
_private_lock = threading.Lock()


def materialise(store: DirectoryStore, entry: Entry) -> Path:
    """A folder that holds exactly the entry's files under their real names.

    `v1/loaded/<key>/<digest of the files>/` in the store, hard links to the blobs where the file
    system has them; a private folder of this process, removed at its end, where the store cannot be
    written. Every file's size and digest are checked once per process, before the path is returned.
    A folder in use is never changed: another build under the same key gets a folder of its own.

    Raises `IntegrityError` when a blob is damaged or gone; the entry is quarantined then, so that the
    next build heals it.
    """
    key = entry.key
    _require_blobs(store, key, entry)
    variant = digest_document({name: record.document() for name, record in entry.files.items()})
    folder = store.loaded_path(key) / variant[:16]
    if _holds(store, folder, entry.files):
        return folder
    try:
        return _lay_out_in_store(store, folder, entry.files)
    except StoreError as error:
        if not files.says_unwritable(error):
            raise
    return _lay_out_privately(store, f"{key}-{variant[:16]}", entry.files)


def _require_blobs(store: DirectoryStore, key: str, entry: Entry) -> None:
    for name, record in entry.files.items():
        path = store.blob_path(record.digest)
        with files.refusals("read", path):
            fault = store.checked.fault(path, record.digest, record.size)
        if fault is None:
            continue
        try:
            quarantine_entry(store, key, entry.blobs)
        except StoreError as error:
            if not files.says_unwritable(error):
                raise
        raise IntegrityError(
            f"file {name!r} of entry {key} is damaged: {fault.value} (blob {record.digest})",
            value=key,
            hint="`neffbuild compile` builds it anew, `neffbuild pull` fetches it again",
        )


def _holds(store: DirectoryStore, folder: Path, records: Mapping[str, FileRecord]) -> bool:
    """Whether the folder holds these files, whole, and nothing else that a loader might pick up."""
    with files.refusals("read", folder):
        try:
            if set(_names_below(folder)) != set(records):
                return False
        except (FileNotFoundError, NotADirectoryError):
            return False
        return all(
            store.checked.fault(folder / name, record.digest, record.size) is None
            for name, record in records.items()
        )


def _names_below(folder: Path, above: str = "") -> Iterator[str]:
    for item in filesystem.items(folder):
        if item.is_folder:
            yield from _names_below(folder / item.name, f"{above}{item.name}/")
        else:
            yield f"{above}{item.name}"


def _lay_out_in_store(
    store: DirectoryStore, folder: Path, records: Mapping[str, FileRecord]
) -> Path:
    with store.scratch_folder() as scratch:
        _lay_out(store, scratch, records)
        files.make_folder(folder.parent)
        for _ in range(_ATTEMPTS):
            try:
                filesystem.rename(scratch, folder)
            except OSError as error:
                if error.errno not in _TAKEN:
                    raise
            else:
                return folder
            # Somebody else was quicker, or what lies there is damaged and makes way.
            if _holds(store, folder, records):
                return folder
            with store.scratch_folder() as away, contextlib.suppress(FileNotFoundError):
                filesystem.rename(folder, away / folder.name)
    raise StoreError(f"{folder} kept changing while an entry was laid out in it")


def _lay_out_privately(store: DirectoryStore, name: str, records: Mapping[str, FileRecord]) -> Path:
    with _private_lock:
        folder = _private_folder() / digest_document(store.url)[:16] / name
        if not _holds(store, folder, records):
            with files.refusals("write", folder):
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                _lay_out(store, folder, records)
        return folder


def _lay_out(store: DirectoryStore, folder: Path, records: Mapping[str, FileRecord]) -> None:
    for name, record in records.items():
        target = folder / name
        files.make_folder(target.parent)
        blob = store.blob_path(record.digest)
        if not _link(blob, target, record.mode):
            fault = files.copy_checked(blob, record.digest, record.size, target)
            if fault is not None:
                raise IntegrityError(f"blob {record.digest} changed while it was copied ({fault})")
            files.copy_executable_bits(target, record.mode)


def _link(blob: Path, target: Path, mode: int) -> bool:
    """Give the blob a second name; False where a copy is needed. A blob that is stored without execute
    permission is not linked as a program: the link would change the blob."""
    is_program = stat.S_IMODE(filesystem.status(blob).st_mode) & 0o100
    if mode & 0o111 and not is_program:
        return False
    try:
        return filesystem.link(blob, target)
    except OSError as error:
        if error.errno not in files.NO_LINKS:
            raise
        return False


def _private_folder() -> Path:
    """This process's own folder; a forked child makes another and leaves its parent's alone."""
    pid = os.getpid()
    if pid not in _private_folders:
        with files.refusals("lay files out below", gettempdir()):
            folder = Path(mkdtemp(prefix="neffbuild-loaded-"))
        _private_folders[pid] = folder
        atexit.register(_remove_private, pid, folder)
    return _private_folders[pid]


def _remove_private(pid: int, folder: Path) -> None:
    if pid == os.getpid():
        shutil.rmtree(folder, ignore_errors=True)
