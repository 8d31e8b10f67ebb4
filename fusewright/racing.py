"""Races between kernels on a device: built by threads meanwhile, timed one by one, and the closest in turns."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from fusewright.errors import FusewrightError
from fusewright.measure import compare
from fusewright.runtime.launch import Launcher
from fusewright.side_by_side import cores

# On a GPU, options are timed from so many parts of their list in turn.
PARTS = 4

Option = dict[str, Any]
Call = Callable[[], object]


@dataclass(frozen=True)
class Build:
    """An option of a group whose kernel is being built: whether it can be is what `done` will tell."""

    option: Option
    launcher: Launcher
    done: Future[bool]


def in_turn(options: Sequence[Option]) -> list[Option]:
    """Options in the order they are timed: some from every part of the list, which has one way after the other, come
    before time is up."""
    part = math.ceil(len(options) / PARTS)
    return [option for first in range(part) for option in options[first::part]]


def fastest(calls: Mapping[int, Call], aten: Call, device: torch.device, long: float) -> tuple[int, float, float]:
    """The fastest of a few calls, its time and that of ATen, in turns and as a program would find the cache: a clock
    that changes its rate between two calls makes more of a difference than they do."""
    samples = compare({**calls, None: aten}, device=device, min_time=0.0, max_time=long)
    best = min(calls, key=lambda i: samples[i].median)
    return best, samples[best].median, samples[None].median


def at_once() -> int:
    """Kernels that are built at one time."""
    return min(16, cores())


def give_way() -> None:
    """This thread has less of a claim to a core than the one that measures."""
    with suppress(AttributeError, OSError):  # where threads have no priorities of their own
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def can_build(launcher: Launcher, device: torch.device) -> bool:
    """Whether a kernel can be built for `device`."""
    return _works(launcher.build, device)


def can_load(launcher: Launcher, device: torch.device) -> bool:
    """Whether a kernel that is built can be loaded on `device`."""
    return _works(launcher.load, device)


def _works(step: Callable[[int], object], device: torch.device) -> bool:
    try:
        step(torch.cuda.current_device() if device == torch.device("cuda") else device.index or 0)
    except (FusewrightError, RuntimeError):
        return False
    return True


def seconds(call: Call, device: torch.device, most: float = float("inf")) -> float:
    """The time of one call among several in a row, the least of a few; not looked into when the first is slow."""
    timed = _timed_on_gpu if device.type == "cuda" else _timed
    call()
    once = timed(call, 1)
    if once > most:
        return once
    count = max(3 if device.type == "cuda" else 1, min(50, int(0.01 / max(once, 1e-6))))
    return min(timed(call, count) for _ in range(3 if device.type == "cuda" else 5))


def _timed(call: Call, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def _timed_on_gpu(call: Call, count: int) -> float:
    """As the device sees it."""
    torch.cuda.synchronize()
    event: Any = torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    start.record()
    for _ in range(count):
        call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) / 1e3 / count
