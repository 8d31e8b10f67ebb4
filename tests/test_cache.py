"""The cache directory: private, refused when somebody else could have written to it, and never half written."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fusewright.errors import UnsupportedError
from fusewright.runtime import cache


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "nested" / "cache"
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(path))
    return path


def test_created_for_its_owner_alone(root: Path) -> None:
    assert cache.cache_directory() == root
    assert stat.S_IMODE(root.stat().st_mode) == 0o700


def test_default_is_the_users_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(cache.ENVIRONMENT_VARIABLE)
    assert cache.cache_path().name == "fusewright"
    assert Path.home() in cache.cache_path().parents


def test_write_list_clear(root: Path) -> None:
    assert cache.entries() == ()
    assert cache.clear() == 0
    assert not root.exists()
    cache.write_atomic(cache.cache_directory() / "device.json", b"{1}")
    (root / "kernels").mkdir()
    (root / "kernels" / "a.so").write_bytes(b"abc")
    assert [(entry.name, entry.size) for entry in cache.entries()] == [("device.json", 3), ("kernels/a.so", 3)]
    assert cache.clear() == 2
    assert cache.entries() == ()
    assert list(root.iterdir()) == []


def test_refuses_a_link(root: Path, tmp_path: Path) -> None:
    root.parent.mkdir()
    root.symlink_to(tmp_path)
    for action in (cache.cache_directory, cache.entries, cache.clear):
        with pytest.raises(UnsupportedError, match="symbolic link"):
            action()


def test_refuses_a_dangling_link(root: Path, tmp_path: Path) -> None:
    root.parent.mkdir()
    root.symlink_to(tmp_path / "nowhere")
    with pytest.raises(UnsupportedError):
        cache.cache_directory()
    with pytest.raises(UnsupportedError):
        cache.entries()


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_refuses_what_others_can_write(root: Path, mode: int) -> None:
    cache.cache_directory().chmod(mode)
    with pytest.raises(UnsupportedError, match="can be written by other users"):
        cache.cache_directory()
    with pytest.raises(UnsupportedError, match="can be written by other users"):
        cache.clear()


def test_refuses_another_owner(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cache_directory()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(UnsupportedError, match="belongs to another user"):
        cache.cache_directory()


def test_refuses_a_file(root: Path) -> None:
    root.parent.mkdir()
    root.write_text("")
    with pytest.raises(UnsupportedError, match=r"cannot be created|is no directory"):
        cache.cache_directory()
    with pytest.raises(UnsupportedError, match="is no directory"):
        cache.entries()


def test_clear_leaves_what_links_point_to(root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("keep")
    (cache.cache_directory() / "link").symlink_to(outside)
    cache.clear()
    assert (outside / "precious").read_text() == "keep"


def test_atomic_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.json"
    cache.write_atomic(path, b"old")
    path.chmod(0o640)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="disk full"):
            cache.write_atomic(path, b"new")
    assert path.read_bytes() == b"old"
    cache.write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["result.json"]


def test_a_new_file_follows_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        cache.write_atomic(tmp_path / "new.json", b"")
    finally:
        os.umask(previous)
    assert stat.S_IMODE((tmp_path / "new.json").stat().st_mode) == 0o640


def test_what_cannot_be_a_directory_is_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.cache_directory()
    made = Path.mkdir

    def full(path: Path, *args: Any, **kwargs: Any) -> None:
        if path != root / "kernels":
            return made(path, *args, **kwargs)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "mkdir", full)
        with pytest.raises(UnsupportedError, match=r"cannot be created: No space left on device"):
            cache.cache_subdirectory("kernels")
    (root / "kernels").write_text("")
    with pytest.raises(UnsupportedError, match=r"cannot be created|is no directory"):
        cache.cache_subdirectory("kernels")


def test_a_directory_in_place_of_a_file(root: Path) -> None:
    """It is not read, what is built is not kept, and no handle stays open."""
    path = cache.cache_directory() / "kernel.so"
    path.mkdir()
    before = len(os.listdir("/dev/fd"))
    assert cache.load(path) is None
    assert cache.built(path, lambda: b"new") == b"new"
    assert len(os.listdir("/dev/fd")) == before


def test_a_home_that_nobody_has(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, "~nobody_has_this_name/cache")
    assert cache.cache_directory() == tmp_path / "~nobody_has_this_name" / "cache"
