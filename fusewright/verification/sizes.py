"""Setting up a verification: the float64 reference, and the batch sizes at which its runs fit time and memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import torch
from torch import Tensor

from fusewright.runtime.memory import is_out_of_memory
from fusewright.verification.context import Context, NotApplicable, Run, summary
from fusewright.verification.inputs import Call, is_real
from fusewright.verification.numerics import WideArithmetic


def set_oracle(context: Context, probe: Call) -> None:
    """Gives the context its float64 reference, if the model runs in float64 and draws the same random numbers there.

    Raises `NotApplicable` where the reference refuses the probe.
    """
    context.oracle, context.oracle_reason = None, ""
    try:
        oracle = deepcopy(context.reference).double()
    except Exception as error:
        context.oracle_reason = f"the reference cannot be copied to float64 ({summary(error)})"
        return
    eager = context.eager(probe)
    context.oracle = oracle
    try:
        truth = context.truth(probe)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        context.oracle, context.oracle_reason = None, f"the reference does not run in float64 ({summary(error)})"
        return
    pairs = [(a, b) for a, b in zip(truth.outputs, eager.outputs, strict=False) if is_real(b)]
    if any(a.dtype not in (torch.float64, torch.complex128) for a, _ in pairs):
        context.oracle, context.oracle_reason = None, "the reference leaves float64 by itself"
    elif any(_grossly_differ(a, b) for a, b in pairs) and _draws_random_numbers(context, probe, eager):
        context.oracle, context.oracle_reason = None, "the reference draws other random numbers in float64"


def _grossly_differ(a: Tensor, b: Tensor) -> bool:
    difference, size = (a - b).abs(), b.abs().to(torch.float64)
    finite = difference.isfinite() & size.isfinite()
    return bool(difference[finite].square().sum() > 0.01 * size[finite].square().sum())


def _draws_random_numbers(context: Context, probe: Call, eager: Run) -> bool:
    options = context.options
    context.options = replace(options, seed=options.seed + 1)
    other = context.eager(probe)
    context.options = options
    return any(not torch.equal(eager.values[key], x) for key, x in other.values.items())


def fit(context: Context, seconds: float | None) -> None:
    """Chooses the sizes of `core` and `side` so that float64 runs fit the memory and time allowed.

    One or two rows are run in float64, their allocations added up and their time taken.  A gradient run keeps about
    three times what its forward allocates, and takes about four times as long; six of them make up the core.  Nothing
    is cut where `seconds` is `None`.
    """
    batch = context.example.batch()
    if batch is None or batch <= 2 or seconds is None:
        set_oracle(context, context.example)
        return
    probe = context.example.resized(2)
    try:
        set_oracle(context, probe)
    except NotApplicable:
        # It takes no other batch, so nothing can be cut.
        set_oracle(context, context.example)
        return
    if context.oracle is None:
        return
    allocated, elapsed = _probe(context, probe)
    context.bytes_per_row = allocated / 2 / 2
    by_memory = context.options.max_bytes / max(3 * allocated / 2, 1)
    by_time = seconds / 4 / max(elapsed / 2 * 6 * 4, 1e-9)
    by_time_aside = seconds / 200 / max(elapsed / 2, 1e-9)
    context.core = _cut(context.example, batch, min(by_memory, by_time))
    context.side = _cut(context.example, batch, min(by_memory, by_time, by_time_aside))


def _probe(context: Context, probe: Call) -> tuple[int, float]:
    """Bytes and seconds of a float64 forward of two rows; the second run counts, the first one warms up."""
    try:
        for _ in range(2):
            mode = WideArithmetic()
            start = time.perf_counter()
            context.run_wide(probe, False, mode)
            if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
                torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
    except Exception:
        return 0, 0.0
    return mode.bytes, elapsed


def _cut(call: Call, batch: int, limit: float) -> Call:
    size = max(2, min(batch, int(limit)))
    return call if size == batch else call.resized(size)


def halve(context: Context) -> bool:
    """Halves the sizes after memory ran out; whether there was anything left to halve."""
    batch = context.core.batch() or 1
    if batch <= 1:
        return False
    context.core = context.core.resized(max(1, batch // 2))
    context.side = context.side.resized(max(1, min(batch // 2, context.side.batch() or 1)))
    return True


def default_max_bytes(call: Call, available: Callable[[], int | None]) -> int:
    """A quarter of the free memory of the device that the inputs live on."""
    device = next((x.device for x in call.tensors() if x.is_cuda), None)
    if device is not None:
        # What the allocator holds and does not use is free as well.
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + cached) // 4
    return (available() or 4 << 30) // 4
