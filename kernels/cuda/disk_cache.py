"""A cache of cubins on disk, private to the user.

A file is a digest and a cubin. The digest is of the key and the cubin: a file that is truncated, changed or renamed is
not loaded, and the kernel is compiled again. Files and folders of other users are not used. A file is written under a
temporary name and then renamed, so that processes may share the folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

LOG = logging.getLogger(__name__)

VARIABLE = "ATTN_OPS_CACHE_DIR"
"""The environment variable that moves the cache."""

MAX_FILES = 1024
"""Most files. A file beyond this limit evicts the least recently used files. One version has some 500 cubins, and
two versions may take turns."""

MAX_BYTES = 64 << 20
"""Larger files are not read: cubins are far smaller."""

OURS = re.compile(r"[0-9a-f]+\.cubin|\.\d+\.[0-9a-f]{16}")
"""Names of files that :func:`store` writes: cubins, and temporary names of files that are being written."""

DIGEST_BYTES = hashlib.sha256().digest_size


def folder() -> Path | None:
    """``attn_ops/cuda`` in ``$ATTN_OPS_CACHE_DIR`` or in the user's cache folder; None if the user has no home."""
    given = os.environ.get(VARIABLE)
    try:
        base = Path(given or os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        return None
    return base / "attn_ops" / "cuda"


@contextlib.contextmanager
def _opened(create: bool) -> Iterator[int]:
    """A file descriptor of the folder, which belongs to this user and has no permissions for other users.

    Raises:
        OSError: there is no folder, or it belongs to another user.
    """
    path = folder()
    if path is None:
        raise FileNotFoundError("the user has no home folder")
    if os.open not in os.supports_dir_fd:
        raise OSError("this system does not open files below an open folder")
    if create:
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}")
        if status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
        yield descriptor
    finally:
        os.close(descriptor)


def unusable_reason() -> str:
    """Why cubins cannot be stored; empty if they can."""
    try:
        with _opened(create=True):
            return ""
    except OSError as error:
        return str(error)


def _digest(key: str, cubin: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + cubin).digest()


def _name(key: str) -> str:
    return f"{key}.cubin"


def load(key: str) -> bytes | None:
    """The cubin of ``key``, a hexadecimal hash. None if there is none, or its file is damaged or another user's."""
    try:
        with _opened(create=False) as where:
            descriptor = os.open(_name(key), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=where)
            with open(descriptor, "rb") as file:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_size > MAX_BYTES:
                    LOG.warning("%s is no file of this user's cache: the kernel is compiled again", _name(key))
                    return None
                content = file.read(MAX_BYTES)
            digest, cubin = content[:DIGEST_BYTES], content[DIGEST_BYTES:]
            if digest != _digest(key, cubin):
                LOG.warning("%s in %s is damaged: the kernel is compiled again", _name(key), folder())
                return None
            with contextlib.suppress(OSError):
                os.utime(_name(key), dir_fd=where, follow_symlinks=False)
            return cubin
    except OSError as error:
        LOG.debug("no compiled kernel %s on disk: %s", key, error)
        return None


def store(key: str, cubin: bytes) -> None:
    """Store the cubin of ``key``. If it cannot be written, nothing is stored, and later processes compile again."""
    try:
        with _opened(create=True) as where:
            partial = f".{os.getpid()}.{secrets.token_hex(8)}"
            descriptor = os.open(
                partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=where
            )
            try:
                with open(descriptor, "wb") as file:
                    file.write(_digest(key, cubin) + cubin)
                os.rename(partial, _name(key), src_dir_fd=where, dst_dir_fd=where)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(partial, dir_fd=where)
                raise
            _remove_oldest(where)
    except OSError as error:
        LOG.info("a compiled kernel is not kept on disk: %s", error)


def _remove_oldest(where: int) -> None:
    """Remove all but the ``MAX_FILES`` most recently used files, also temporary files of processes that have ended."""
    used: list[tuple[float, str]] = []
    for name in filter(OURS.fullmatch, os.listdir(where)):
        with contextlib.suppress(OSError):
            used.append((os.stat(name, dir_fd=where, follow_symlinks=False).st_mtime, name))
    for _, name in sorted(used)[: max(0, len(used) - MAX_FILES)]:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=where)
