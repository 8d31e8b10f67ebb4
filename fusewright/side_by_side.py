"""Work in Python that several processes share."""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# More processes than this are not begun.
MOST = 16

# What a forked process has to do: the work, and all items.
_given: list[Any] = []


def side_by_side(work: Callable[[Item], Answer], items: Sequence[Item], seconds: float) -> list[Answer] | None:
    """``[work(item) for item in items]``, found by processes that are forked off.

    They begin with everything that this process has, so nothing is imported again or sent to them; answers are pickled.
    The work must leave devices and threads alone: a forked process has neither.  `None` where that cannot be done
    (there is one core or one item, a system does not fork, this process is a daemon) or takes more than `seconds`.
    """
    count = min(MOST, len(items), cores())
    forks = "fork" in multiprocessing.get_all_start_methods()
    if count < 2 or not forks or multiprocessing.current_process().daemon:
        return None
    with warnings.catch_warnings():
        # PyTorch has threads, which a forked process lacks; what is done in it waits for none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            pool = multiprocessing.get_context("fork").Pool(count, _begin, (work, items))
        except OSError:  # there is no memory for them
            return None
    with pool:
        try:
            return pool.map_async(_answer, range(len(items)), chunksize=1).get(seconds)
        except multiprocessing.TimeoutError:
            return None


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _begin(work: Callable[[Any], Any], items: Sequence[Any]) -> None:
    _given[:] = work, items


def _answer(index: int) -> Any:
    work, items = _given
    return work(items[index])
