"""Work in Python that several processes share."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")

# More processes than this are not begun.
MOST = 16


def side_by_side(work: Callable[[Item], Answer], items: Sequence[Item], seconds: float) -> list[Answer] | None:
    """``[work(item) for item in items]``, found by processes that are forked off.

    They begin with everything that this process has, so nothing is imported again or sent to them; answers are pickled.
    The work must leave devices and threads alone: a forked process has neither.  `None` where that cannot be done
    (there is one core or one item, a system does not fork, this process is a daemon), where it takes more than
    `seconds`, and where work fails or a process dies: whoever does the work himself then learns why.
    """
    count = min(MOST, len(items), cores())
    forks = "fork" in multiprocessing.get_all_start_methods()
    if count < 2 or not forks or multiprocessing.current_process().daemon:
        return None
    context = multiprocessing.get_context("fork")
    turn, until = context.Value("i", 0), time.monotonic() + seconds
    pipes: list[Connection] = []
    processes: list[Any] = []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_answer, args=(work, items, turn, theirs), daemon=True)
            with warnings.catch_warnings():
                # PyTorch has threads, which a forked process lacks; what is done in it waits for none of them.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        return _gathered(pipes, len(items), until)
    except OSError:  # there is no memory for them
        return None
    finally:
        for process in processes:
            process.kill()
            process.join()
        for pipe in pipes:
            pipe.close()


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _answer(work: Callable[[Any], Any], items: Sequence[Any], turn: Any, pipe: Connection) -> None:
    """In a forked process: answers items as their turn comes, until there are none left or one fails."""
    with suppress(Exception):
        while True:
            with turn.get_lock():
                index = turn.value
                turn.value += 1
            if index >= len(items):
                return
            pipe.send((index, work(items[index])))


def _gathered(pipes: Sequence[Connection], count: int, until: float) -> list[Any] | None:
    """The answers of so many items in their order; `None` where some do not come in time."""
    answers: dict[int, Any] = {}
    talking = list(pipes)
    while len(answers) < count:
        ready = wait(talking, timeout=max(0.0, until - time.monotonic())) if talking else []
        if not ready:
            return None
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                index, answer = pipe.recv()
            except EOFError:  # it has no more to say
                talking.remove(pipe)
            else:
                answers[index] = answer
    return [answers[index] for index in range(count)]
