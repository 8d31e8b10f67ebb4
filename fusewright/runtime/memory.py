"""How much host memory is left, what running out of it looks like, and a while in which none is collected."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes() -> int | None:
    """Host memory that a new allocation could get, within the container's limit; `None` where this cannot be known."""
    limits = [value for value in (_free_of_machine(), _free_of_container()) if value is not None]
    return min(limits) if limits else None


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out; PyTorch reports the host's as a plain `RuntimeError`."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in ("can't allocate memory", "not enough memory", "out of memory")
    )


def _free_of_machine() -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    kilobytes = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kilobytes[0]) * 1024 if kilobytes else None


def _free_of_container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    # Cached file pages count as used but are given up on demand.
    return int(limit) - used + int(stat.get("inactive_file", 0)) if limit.isdigit() else None


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """No cycle is collected meanwhile, which would take time, or free what others use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
