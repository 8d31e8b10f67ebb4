"""A process that measures, so that a lost device or a hang costs one row of a benchmark."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch

Work = Callable[..., None]

# What an error says after which a process can do no more on its GPU.
LOST = "CUDA error"


def sentence(failure: Exception) -> str:
    """What went wrong, in one line."""
    lines = str(failure).strip().splitlines()
    return f"{type(failure).__name__}: {lines[0][:200]}" if lines else type(failure).__name__


def attempted(record: dict[str, Any], fill: Callable[[dict[str, Any]], None], device: torch.device) -> dict[str, Any]:
    """`record` as `fill` leaves it, with how long that took and what failed, if anything; memory is given back."""
    begun = time.perf_counter()
    record["error"] = ""
    try:
        fill(record)
    except Exception as failure:
        record["error"] = sentence(failure)
    torch.compiler.reset()
    gc.collect()
    if device.type == "cuda" and LOST not in record["error"]:
        torch.cuda.empty_cache()
    return {**record, "took": time.perf_counter() - begun}


def answer(pipe: Connection, row: Callable[[Any], dict[str, Any]]) -> None:
    """Answers jobs with rows, until told `None` or the device is lost."""
    while (job := pipe.recv()) is not None:
        found = row(job)
        pipe.send(found)
        if LOST in found["error"]:  # the context is of no more use
            return


class Worker:
    """A process that measures, and another when it is lost.

    It runs `work(pipe, *arguments)`, which first of all sends `facts`, then has `answer` take the jobs.
    """

    def __init__(self, work: Work, *arguments: Any) -> None:
        self._work, self._arguments = work, arguments
        self.facts: dict[str, Any] = self._start()

    def _start(self) -> dict[str, Any]:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._work, args=(theirs, *self._arguments))
        self._process.start()
        theirs.close()
        facts: dict[str, Any] = self._pipe.recv()
        return facts

    def row(self, job: Any, lost: dict[str, Any], limit: float) -> dict[str, Any]:
        """The row of one job; after `limit` seconds, or a crash, `lost` with what happened as its error."""
        if not self._process.is_alive():
            self._start()
        self._pipe.send(job)
        try:
            if self._pipe.poll(limit):
                row: dict[str, Any] = self._pipe.recv()
                if LOST in row["error"]:
                    self._process.join(10)
                return row
            reason = f"it took more than {limit:g} s"
        except EOFError:
            reason = "the process that measured it died"
        self.kill()
        return {**lost, "took": limit, "error": reason}

    def stop(self) -> None:
        """Ends the process."""
        if self._process.is_alive():
            self._pipe.send(None)
        self._process.join(10)
        self.kill()

    def kill(self) -> None:
        """Ends it at once."""
        self._process.kill()
        self._process.join()
