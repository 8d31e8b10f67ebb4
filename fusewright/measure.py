"""Measuring: several candidates in one run, interleaved, warmed up, on caches that hold no more than they would in use.

PyTorch's own `torch.utils.benchmark` times one statement after another and calls each two more times per block, which
neither interleaves nor bounds the time that a slow model takes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from fusewright.runtime.memory import no_garbage_collection
from fusewright.tree import tree_flatten, tree_map

Candidate = Callable[[], object]
Name = TypeVar("Name", bound=Hashable)

# One timed block is at least this long, so that the clock's resolution does not show.
_BLOCK_SECONDS = {"cuda": 2e-3, "cpu": 10e-3}
# On a CPU, the threads of what ran before may still wait in a loop, and its data fill the caches: a candidate that
# takes less than so many seconds is called once before the clock starts.
_DISTURBED_SECONDS = 0.1


@dataclass(frozen=True)
class Sample:
    """Seconds per call: the median, the quartiles around it, and the number of timed blocks."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: list[float]) -> Sample:
        """Summarises measured times; a single one is its own quartiles."""
        if len(seconds) < 2:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


def compare(
    candidates: Mapping[Name, Candidate],
    *,
    device: torch.device | str = "cpu",
    min_time: float = 0.5,
    rounds: int = 15,
    max_time: float = 30.0,
    cold: bool = True,
) -> dict[Name, Sample]:
    """Seconds per call of each candidate, measured in turns: what slows the machine down slows all of them.

    Each is called twice to warm up, and a short one on a CPU once more before each of its turns.  Then rounds follow
    until there are `rounds` of them and each candidate has been timed for `min_time` seconds, or until `max_time`
    seconds have passed in all, though never fewer than one round.  On CUDA, `cold` empties the L2 cache before every
    call, as the rest of a real program would; pass `cold=False` for inputs that do stay in the cache.  What a candidate
    raises is not caught.
    """
    device = torch.device(device)
    timed = _timer_of(device, cold)
    start = time.perf_counter()
    turns = {name: _warm_up(call, timed, device) for name, call in candidates.items()}
    seconds: dict[Name, list[float]] = {name: [] for name in candidates}
    for name, turn in turns.items():
        if turn.seconds >= _DISTURBED_SECONDS:  # a call that is long has been timed: that was its first turn
            seconds[name].append(turn.seconds)
    order = list(candidates)
    for rounds_done in itertools.count(1):
        for name in order:
            if len(seconds[name]) == rounds_done:
                continue
            for _ in range(turns[name].untimed):
                candidates[name]()
            seconds[name].append(timed(candidates[name], turns[name].timed))
        # Nobody always runs right after the same neighbour.
        order = [*order[1:], *order[:1]]
        spent = min((sum(times) * turns[name].timed for name, times in seconds.items()), default=math.inf)
        if (rounds_done >= rounds and spent >= min_time) or time.perf_counter() - start > max_time:
            break
    return {name: Sample.of(times) for name, times in seconds.items()}


class _Turn(NamedTuple):
    """Calls of a candidate in each round; seconds that one took before the rounds."""

    untimed: int
    timed: int
    seconds: float


def _warm_up(call: Candidate, timed: Callable[[Candidate, int], float], device: torch.device) -> _Turn:
    """Calls twice (the first call may compile) and says how many calls a turn has."""
    call()
    seconds = max(timed(call, 1), 1e-7)
    if device.type == "cuda":
        return _Turn(0, max(1, math.ceil(_BLOCK_SECONDS["cuda"] / seconds)), seconds)
    return _Turn(int(seconds < _DISTURBED_SECONDS), max(1, math.ceil(_BLOCK_SECONDS["cpu"] / seconds)), seconds)


def _timer_of(device: torch.device, cold: bool) -> Callable[[Candidate, int], float]:
    if device.type != "cuda":
        return _time_on_host
    flush = _l2_flusher(device) if cold else None
    return lambda call, repeats: _time_on_cuda(call, repeats, device, flush)


def _time_on_host(call: Candidate, repeats: int) -> float:
    with no_garbage_collection():
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats


def _time_on_cuda(call: Candidate, repeats: int, device: torch.device, flush: Candidate | None) -> float:
    """The mean over `repeats` calls of the time between two events around each."""
    with torch.cuda.device(device), no_garbage_collection():
        pairs = [(_event(), _event()) for _ in range(repeats)]
        for start, end in pairs:
            if flush is not None:
                flush()
            start.record()
            call()
            end.record()
        torch.cuda.synchronize(device)
        milliseconds: float = sum(start.elapsed_time(end) for start, end in pairs)
        return milliseconds / 1e3 / repeats


def share_of_host(call: Candidate, device: torch.device) -> float:
    """The part of a call on a GPU until its host is done launching: near 1 where the GPU waits for it."""
    shares = []
    for _ in range(4):
        torch.cuda.synchronize(device)
        begun = time.perf_counter()
        call()
        launched = time.perf_counter()
        torch.cuda.synchronize(device)
        shares.append((launched - begun) / (time.perf_counter() - begun))
    return min(shares[1:])  # the first one may compile


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _l2_flusher(device: torch.device) -> Candidate:
    """Twice the cache would empty it; the rest is time in which a slow host gets ahead of a short call."""
    size = torch.cuda.get_device_properties(device).L2_cache_size
    scratch = torch.empty(4 * size, dtype=torch.uint8, device=device)
    return scratch.zero_


def forward_call(module: nn.Module, inputs: object) -> Candidate:
    """A call of the module without gradients; `inputs` holds positional (tuple, list) or keyword arguments (dict)."""
    call = _bound(module, inputs)

    def run() -> object:
        with torch.no_grad():
            return call(inputs)

    return run


def training_call(module: nn.Module, inputs: object, *, input_gradients: bool = True) -> Candidate:
    """A forward and a backward of the module, for one fixed cotangent per output.

    The gradients of the parameters, and of the real inputs unless `input_gradients` is false, are computed and freed;
    nobody's ``.grad`` is touched.  The first call fixes the cotangents.  Raises `ValueError` in the call where nothing
    has a gradient.
    """
    call = _bound(module, inputs)
    leaves: list[Tensor] = []

    def as_leaf(x: Any) -> Any:
        if not (isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())):
            return x
        leaf = x.detach().requires_grad_(input_gradients)
        leaves.append(leaf)
        return leaf

    given = tree_map(as_leaf, inputs)
    wanted = [x for x in (*leaves, *module.parameters()) if x.requires_grad]
    cotangents: list[Tensor] = []

    def run() -> object:
        with torch.enable_grad():
            outputs, _ = tree_flatten(call(given))
            ends = [x for x in outputs if isinstance(x, Tensor) and x.requires_grad]
            if not ends or not wanted:
                raise ValueError(f"{type(module).__name__} has no gradient to time: no output depends on a leaf")
            if not cotangents:
                cotangents.extend(torch.randn_like(x) for x in ends)
            return torch.autograd.grad(ends, wanted, cotangents, allow_unused=True)

    return run


def _bound(module: nn.Module, inputs: object) -> Callable[[Any], object]:
    if isinstance(inputs, Mapping):
        return lambda given: module(**given)
    if isinstance(inputs, Tensor):
        return module
    return lambda given: module(*given)


def environment(device: torch.device | str = "cpu") -> dict[str, Any]:
    """What a result must name to be read later: device, versions, threads, date."""
    device = torch.device(device)
    facts: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        facts["cuda"] = torch.version.cuda
        facts["cudnn"] = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return facts


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def save_results(path: Path | str, record: Mapping[str, Any]) -> None:
    """Writes a record as JSON, whole or not at all; folders on the way are made.

    Raises `OSError` where the file cannot be written and `TypeError` where the record is no JSON.
    """
    path = Path(path)
    text = json.dumps(record, indent=2) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
