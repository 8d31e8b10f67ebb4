"""The cache directory: device facts and compiled kernels, so nothing in it may come from another user.

The directory is ``$FUSEWRIGHT_CACHE_DIR`` or the platform's cache directory for this user.  It is created for its owner
alone, and refused when somebody else could have written to it.  Files appear under their final name only when complete.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from platformdirs import user_cache_path

from fusewright.errors import UnsupportedError

try:
    import fcntl
except ImportError:  # no POSIX: nobody waits for anybody, at worst something is built twice
    fcntl = None  # type: ignore[assignment]

ENVIRONMENT_VARIABLE = "FUSEWRIGHT_CACHE_DIR"


@dataclass(frozen=True)
class Entry:
    """One cached file: its name inside the cache, its size in bytes and when it was written (seconds since 1970)."""

    name: str
    size: int
    modified: float


def cache_path() -> Path:
    """Where the cache is, or would be; creates nothing."""
    chosen = os.environ.get(ENVIRONMENT_VARIABLE)
    return Path(os.path.expanduser(chosen)).absolute() if chosen else user_cache_path("fusewright", appauthor=False)


def cache_directory() -> Path:
    """The cache directory, created for its owner alone.

    Raises `UnsupportedError` when it cannot be created or is not safely ours (see `check_directory`).
    """
    path = cache_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(f"cache directory {path} cannot be created: {error.strerror}; {_REMEDY}") from error
    check_directory(path)
    return path


def check_directory(path: Path) -> None:
    """Raises `UnsupportedError` when `path` is no directory, a link, another user's, or writable by others."""
    found = path.lstat()
    if stat.S_ISLNK(found.st_mode):
        raise UnsupportedError(f"cache directory {path} is a symbolic link; {_REMEDY}")
    if not stat.S_ISDIR(found.st_mode):
        raise UnsupportedError(f"cache directory {path} is no directory; {_REMEDY}")
    if hasattr(os, "geteuid") and found.st_uid != os.geteuid():
        raise UnsupportedError(f"cache directory {path} belongs to another user; {_REMEDY}")
    if os.name == "posix" and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsupportedError(f"cache directory {path} can be written by other users; chmod 700 it, or {_REMEDY}")


def cache_subdirectory(name: str) -> Path:
    """A directory in the cache, under the same rules."""
    path = cache_directory() / name
    try:
        path.mkdir(mode=0o700, exist_ok=True)
    except OSError as error:
        raise UnsupportedError(f"cache directory {path} cannot be created: {error.strerror}; {_REMEDY}") from error
    check_directory(path)
    return path


def built(path: Path, build: Callable[[], bytes], timeout: float = 30.0) -> bytes:
    """What `path` keeps, or else what `build` returns, kept there for the next.

    Processes and threads that want the same file wait for the first of them, at most `timeout` seconds, then build too.
    A file that cannot be written is not kept.
    """
    if (content := load(path)) is not None:
        return content
    with lock(path.with_name(f".{path.name}.lock"), timeout):
        if (content := load(path)) is not None:
            return content
        content = build()
        with suppress(OSError):
            write_atomic(path, hashlib.sha256(content).digest() + content)
    return content


def load(path: Path) -> bytes | None:
    """What `built` kept at `path`; `None` when it is absent, no file, another user's, or not what was written."""
    try:
        handle = os.open(path, os.O_RDONLY | _NEITHER_LINK_NOR_CHILD)
    except OSError:
        return None
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or (hasattr(os, "geteuid") and found.st_uid != os.geteuid()):
            return None
        with open(handle, "rb", closefd=False) as file:
            digest, content = file.read(32), file.read()
    finally:
        os.close(handle)
    return content if hashlib.sha256(content).digest() == digest else None


@contextmanager
def lock(path: Path, timeout: float) -> Iterator[bool]:
    """Holds the lock file `path`, or goes on without after `timeout` seconds; yields whether it is held.

    The operating system drops the lock of a process that dies, so a file left behind holds nobody up.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | _NEITHER_LINK_NOR_CHILD, 0o600)
    except OSError:
        yield False
        return
    held = False
    try:
        held = _locked(handle, time.monotonic() + timeout)
        yield held
    finally:
        if held:  # who waits for this very file gets it still, and looks again at what was built
            path.unlink(missing_ok=True)
        os.close(handle)


def _locked(handle: int, deadline: float) -> bool:
    """Whether an open file could be locked before `deadline` (of `time.monotonic`)."""
    while fcntl is not None:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.01)
        except OSError:  # a file system without locks
            return False
    return False


def entries() -> tuple[Entry, ...]:
    """Everything in the cache, by name; empty where there is no cache yet.

    Raises `UnsupportedError` when the cache directory is not safely ours.
    """
    root = cache_path()
    if not os.path.lexists(root):
        return ()
    check_directory(root)
    files = sorted(path for path in root.rglob("*") if path.is_file() and not path.is_symlink())
    return tuple(Entry(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime) for path in files)


def clear() -> int:
    """Empties the cache and returns how many files went.

    Raises `UnsupportedError` when the cache directory is not safely ours.
    """
    count = len(entries())
    root = cache_path()
    if not root.exists():
        return 0
    for path in root.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return count


def write_atomic(path: Path, content: bytes) -> None:
    """Writes a file that is either absent, as it was, or complete; readers never see half of it.

    Raises `OSError` as the file system does; no temporary file is left behind.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, _mode_of_new_file(path))
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _mode_of_new_file(path: Path) -> int:
    """What the file had before, else what a plainly created file would get; `mkstemp` alone would hide it from all."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    mask = os.umask(0)
    os.umask(mask)
    return 0o666 & ~mask


_NEITHER_LINK_NOR_CHILD = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_REMEDY = f"set {ENVIRONMENT_VARIABLE} to a directory of your own"
