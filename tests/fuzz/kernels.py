"""Random models through all passes up to generated kernels: the program on a CPU, and every kernel emulated.

    PYTHONPATH=tests python -m tests.fuzz.kernels --seed 0 --count 100

An even seed draws a chain (`tests.fuzz.modules`), an odd one a model that branches (`tests.fuzz.branches`).  Of each:

- the program on a CPU, where operators run their references, equals the model in float64, at two batch sizes;
- every kernel, emulated on the operands it gets, equals its reference, at two batch sizes, generated for a third;
- a NaN in an operand comes out where the reference has one;
- building neither raises nor takes long, gives the same text again, and no name of the model's gets into it.
"""

from __future__ import annotations

import argparse
import copy
import re
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from unittest.mock import patch

import torch
from emulation.emulate import ORDERS, emulate
from torch import Tensor, nn

if __package__:
    from tests.fuzz import branches, modules
    from tests.fuzz.branches import Call
else:
    import branches
    import modules
    from branches import Call

from fusewright import pipeline, tuning
from fusewright.codegen import cuda
from fusewright.errors import CaptureError
from fusewright.kernel import Kernel
from fusewright.pipeline import Built
from fusewright.runtime import nvrtc
from fusewright.runtime.device import DeviceFacts
from fusewright.runtime.operators import operator
from fusewright.schedule import contraction

# A large GPU, so that rewriting does what it does there.
FACTS = DeviceFacts("GPU", conv=1.2e14, matmul=5e13, wide=5e13, memory=3.5e12, reduce=3e12, window=3e11, launch=6e-6)
SECONDS = 10.0  # a build may take
DTYPES = (torch.float32,) * 5 + (torch.float64, torch.bfloat16, torch.float16)
NAMES = ("kangaroo", "wallaby", "bandicoot")  # what the models call their own
IDENTIFIER = re.compile(r"fused(_[a-z0-9]+)*")


class Wrong(Exception):
    """A model that a generated kernel, or the program around it, does something else than."""


@dataclass
class Tally:
    """What came of some models."""

    models: int = 0
    refused: int = 0  # not to be captured, or not to be run on a CPU
    kernels: int = 0
    emulated: int = 0  # times that a kernel ran
    families: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)


def run(seeds: Sequence[int], *, most: int = 100, compiled: bool = False) -> Tally:
    """All models of these seeds, with `most` kernels of each emulated; `compiled`: NVRTC takes them all as well."""
    tally = Tally()
    for seed in seeds:
        tally.models += 1
        try:
            check(seed, tally, most, compiled)
        except (CaptureError, NotImplementedError):  # what ATen does not have on a CPU
            tally.refused += 1
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            tally.failures[seed] = f"{type(error).__name__}: {error}\n{text}"
    return tally


def draw(seed: int) -> Call:
    """The model of this seed and a call, in float64."""
    if seed % 2:
        return branches.draw(seed)
    drawn = modules.draw(seed)
    return Call(drawn.model.eval(), (drawn.x,))


def check(seed: int, tally: Tally, most: int, compiled: bool) -> None:
    random = Random(seed)
    call = draw(seed)
    carries = _check_program(call)
    dtype = random.choice(DTYPES)
    narrow = Call(copy.deepcopy(call.model).to(dtype), tuple(_narrowed(a, dtype) for a in call.args))
    if not branches.right(copy.deepcopy(narrow.model), narrow.args):  # a cast to a fixed type in its midst
        narrow = call
    layout = random.choice(("contiguous", "contiguous", "channels_last"))

    def batched(batch: int | None = None) -> Call:
        some = narrow if batch is None else _larger(narrow, batch, carries)
        return Call(some.model, tuple(_laid_out(a, layout) for a in some.args))

    built = _built(batched(512 if random.random() < 0.5 else None))
    tally.families.update(c.family for c in built.choices)
    tally.kernels += len(built.program.kernels)
    if compiled:
        for kernel in built.program.kernels:
            nvrtc.compile(kernel.source, "sm_90", name=kernel.name)
    calls = [batched(), batched(5)] if any(carries) else [batched()]
    chosen = random.sample(built.program.kernels, min(most, len(built.program.kernels)))
    for each in calls:
        for kernel, operands in _recorded(built, each):
            if kernel in chosen:
                _check_kernel(kernel, operands, random)
                tally.emulated += 1


def _narrowed(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value


def _larger(call: Call, batch: int, carries: Sequence[bool]) -> Call:
    """The same call with `batch` samples in the arguments that carry the batch."""

    def grown(value: Tensor, carried: bool) -> Tensor:
        if not carried:
            return value
        repeated = value.repeat(-(-batch // len(value)), *[1] * (value.ndim - 1))[:batch].clone()
        if not value.is_floating_point():
            return repeated
        drift = torch.linspace(-1, 1, repeated.numel(), dtype=torch.float64).sin().view_as(repeated)
        return (repeated.double() * 0.9 + 0.1 * drift).to(value.dtype)

    return Call(call.model, tuple(map(grown, call.args, carries)))


def _built(call: Call) -> Built:
    """All passes as on a GPU; twice, to see that they are deterministic."""

    def once() -> Built:
        with (
            patch.dict(tuning.TARGETS, cpu=cuda),
            patch.object(contraction, "has_strips", lambda device: False),
            patch.object(pipeline, "kernel_target", lambda device: None),
            patch.object(pipeline, "device_facts", lambda device: FACTS),
            patch.object(pipeline, "tf32_allowed", lambda precision: (False, False)),
        ):
            return pipeline.build(copy.deepcopy(call.model), call.args, {}, kernels="always", measure=False)

    begin = time.process_time()  # not that of others on the machine
    built = once()
    took = time.process_time() - begin
    if took > SECONDS:
        raise Wrong(f"building took {took:.1f} s")
    again = once()
    if built.program.source != again.program.source:
        raise Wrong(f"two builds, two programs:\n{built.program.source}\n{again.program.source}")
    for one, other in zip(built.program.kernels, again.program.kernels, strict=True):
        if one != other:
            raise Wrong(f"two builds, two kernels:\n{one}\n{other}")
        _check_text(one)
    names = [kernel.name for kernel in built.program.kernels]
    if len(set(names)) < len(names) or set(names) != {c.name for c in built.choices}:
        raise Wrong(f"kernels {names} for the choices {built.choices}")
    return built


def _check_text(kernel: Kernel) -> None:
    """Only names of ours, and none of the model's."""
    names = [kernel.name, *(launch.entry for launch in kernel.launches)]
    if not all(map(IDENTIFIER.fullmatch, names)):
        raise Wrong(f"{names} are no names of ours")
    found = [name for name in NAMES if name in kernel.source or name in kernel.reference]
    if found:
        raise Wrong(f"{found} got into the text of {kernel.name}")


# The program on a CPU


def _check_program(call: Call) -> list[bool]:
    """In float64, at two batch sizes where the batch is symbolic; returns which arguments carry it."""
    built = _built(call)
    carries = [not isinstance(n.shape[0], int) for n in built.captured.graph.inputs]
    for each in [call, _larger(call, 5, carries)] if any(carries) else [call]:
        with torch.no_grad():
            old = copy.deepcopy(each.model)(*(a.clone() for a in each.args))
            derive, forward = built.program.functions()
            new = forward(each.model, *(a.clone() for a in each.args), *derive(each.model))
        for i, (a, b) in enumerate(zip(new, old, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise Wrong(f"output {i} is {tuple(a.shape)} {a.dtype} instead of {tuple(b.shape)} {b.dtype}")
            scale = 1e-9 if b.dtype == torch.float64 else 1e-5
            if not torch.allclose(a.double(), b.double(), rtol=scale, atol=scale, equal_nan=True):
                raise Wrong(f"output {i} is off by {float((a.double() - b.double()).abs().max()):.3e}")
    return carries


def _recorded(built: Built, call: Call) -> list[tuple[Kernel, tuple[Tensor, ...]]]:
    """The kernels in the order they are called, with their operands."""
    found: list[tuple[Kernel, tuple[Tensor, ...]]] = []

    def recorder(kernel: Kernel) -> Callable[..., Tensor]:
        def recorded(*tensors: Tensor) -> Tensor:
            found.append((kernel, tuple(t.detach().clone() for t in tensors)))
            return operator(kernel)(*tensors)

        return recorded

    derive, forward = built.program.functions()
    forward.__globals__.update({kernel.name: recorder(kernel) for kernel in built.program.kernels})
    with torch.no_grad():
        forward(call.model, *(a.clone() for a in call.args), *derive(call.model))
    return found


# A kernel


def _check_kernel(kernel: Kernel, operands: tuple[Tensor, ...], random: Random) -> None:
    """Emulated on these operands as they are, and with a NaN in one of them."""
    dense = tuple(_laid_out(t, layout) for t, layout in zip(operands, kernel.layouts, strict=True))
    emulated = _several(emulate(kernel, *dense, order=random.choice(ORDERS), seed=random.randrange(3)))
    wanted = _several(operator(kernel).reference(*operands))
    true, shaken = (_wide(kernel)(*given) for given in (operands, map(_shaken, operands)))
    for results in zip(emulated, wanted, true, shaken, strict=True):
        _check_result(kernel, *results)
    _check_nan(kernel, dense, random)


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (results,) if isinstance(results, Tensor) else results


def _check_result(kernel: Kernel, got: Tensor, want: Tensor, truth: Tensor, moved: Tensor) -> None:
    """Against ATen, the truth, and that of operands that were `moved` a little."""
    if got.shape != want.shape or got.dtype != want.dtype:
        raise Wrong(f"{kernel.name} gives {tuple(got.shape)} {got.dtype}, not {tuple(want.shape)} {want.dtype}")
    shaken = _error(moved, truth)
    eps = torch.finfo(want.dtype).eps
    scale = _largest(truth)
    allowed = 8 * (_error(want, truth) + shaken) + 16 * eps * scale + 1e-7 * min(1.0, eps / 1e-7)
    fits = truth.isfinite() & (truth.abs() < torch.finfo(want.dtype).max) & want.isfinite()
    error = _largest((got.double() - truth)[fits])
    if not error <= allowed:
        raise Wrong(f"{kernel.name} is off by {error:.3e}, ATen by {_error(want, truth):.3e}; {allowed:.3e} allowed")


def _check_nan(kernel: Kernel, operands: tuple[Tensor, ...], random: Random) -> None:
    """A NaN in one place of one operand comes out in the same places."""
    spoiled = [t.clone() for t in operands]
    t = spoiled[0]  # no weight: one on a padded border counts or not as ATen pleases
    if not t.is_floating_point():
        return
    places = [random.randrange(d) for d in t.shape]
    t[tuple(places)] = float("nan")
    emulated = _several(emulate(kernel, *spoiled, order=random.choice(ORDERS)))
    wanted = _wide(kernel)(*spoiled)  # a narrow convolution of ATen's makes more NaNs on a CPU
    for got, want in zip(emulated, wanted, strict=True):
        if torch.equal(got.isnan(), want.isnan()):
            continue
        lost, made = int((want.isnan() & ~got.isnan()).sum()), int((got.isnan() & ~want.isnan()).sum())
        raise Wrong(f"{kernel.name} loses {lost} NaNs and makes {made} of {want.numel()}, from one at {places}")


def _laid_out(t: Tensor, layout: str) -> Tensor:
    if layout == "contiguous" or t.ndim not in (4, 5):
        return t.contiguous()
    return t.contiguous(memory_format=torch.channels_last if t.ndim == 4 else torch.channels_last_3d)


def _wide(kernel: Kernel) -> Callable[..., tuple[Tensor, ...]]:
    """The reference with float64 for every floating-point type; all results."""
    namespace: dict[str, Any] = {"torch": torch, "F": nn.functional}
    exec(re.sub(r"torch\.(float32|float16|bfloat16|half|float)\b", "torch.float64", kernel.reference), namespace)
    function = namespace["reference"]

    def wide(*tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(r.double() for r in _several(function(*(_narrowed(t, torch.float64) for t in tensors))))

    return wide


def _shaken(t: Tensor) -> Tensor:
    """Moved by about one unit in the last place."""
    if not t.is_floating_point():
        return t
    noise = torch.randn(t.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return t.double() * (1 + torch.finfo(t.dtype).eps * noise)


def _error(value: Tensor, truth: Tensor) -> float:
    fine = truth.isfinite() & value.isfinite()
    return _largest((value.double() - truth)[fine])


def _largest(value: Tensor) -> float:
    """The greatest magnitude among finite values; 0 where there are none."""
    fine = value[value.isfinite()]
    return float(fine.abs().max()) if fine.numel() else 0.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run models from the command line; 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.kernels", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=100, help="how many models")
    parser.add_argument("--most", type=int, default=3, help="kernels of a model that are emulated")
    parser.add_argument("--compiled", action="store_true", help="NVRTC takes every kernel as well")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    total = Tally()
    for seed in range(options.seed, options.seed + options.count):
        one = run([seed], most=options.most, compiled=options.compiled)
        for name in ("models", "refused", "kernels", "emulated", "families"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
        total.failures |= one.failures
        for text in one.failures.values():
            print(f"seed {seed}: {text}\n", flush=True)
    print(f"{total.models} models, {total.refused} not captured, {total.kernels} kernels, {total.emulated} emulations")
    print(f"{dict(total.families)}, {len(total.failures)} failed: {list(total.failures)}")
    return int(bool(total.failures))


if __name__ == "__main__":
    sys.exit(main())
