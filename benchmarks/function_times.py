"""What the functions of the pointwise table take on a CPU: a generated kernel of one function beside ATen's operation.

    python benchmarks/function_times.py --threads 2 --out benchmarks/results/cpu_functions.json
    python benchmarks/function_times.py --only sin,cos --scale 1000

Arguments are normal and of a standard deviation of `--scale`, their magnitudes where a function wants numbers above
zero.  They fit the second cache, so memory is no part of it; both sides allocate their result at every call.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from fusewright.codegen.aten import lower_function
from fusewright.codegen.cpu.stream import kernel
from fusewright.ir import ops, pointwise
from fusewright.ir.build import pointwise as applied
from fusewright.ir.node import Graph, make
from fusewright.measure import Sample, compare, environment, save_results
from fusewright.runtime.native import launcher
from fusewright.runtime.operators import reference_of
from fusewright.schedule.stream import parse
from fusewright.schedule.stream_record import Stream

ELEMENTS = 2**17
# Parameters of families that have no defaults.
PARAMETERS: dict[str, tuple[Any, ...]] = {
    **{"clamp": (-0.5, 0.5), "clamp_min": (-0.5,), "clamp_max": (0.5,), "threshold": (0.1, 0.0)},
    **{"pow": (1.7,), "round_to": (2,)},
}
ABOVE_ZERO = {"log", "log2", "log10", "log1p", "sqrt", "rsqrt", "pow"}
BELOW_ONE = {"asin", "acos", "atanh", "logit", "entr"}


def functions() -> dict[str, tuple[Any, ...]]:
    """The functions of one variable, with their parameters."""
    names = [n for n in pointwise.functions() if pointwise.traits(n, PARAMETERS.get(n, ())).arity == 1]
    names.remove("logical_not")  # its results are truths
    found = {n: (n, *PARAMETERS.get(n, ())) for n in names}
    return {**found, "gelu_tanh": ("gelu", "tanh")}


def measured(name: str, parameters: tuple[Any, ...], x: Tensor) -> dict[str, Sample]:
    """Times of the generated kernel and of ATen."""
    given = make(ops.Input(tuple(x.shape), x.dtype, x.device, "x", 0))
    root = applied(name, given, params=parameters)
    graph = Graph((given,), (root,))
    stream = parse(root, graph.users())
    assert isinstance(stream, Stream), stream
    generated = kernel(stream, f"fused_{name}", lower_function("reference", graph))
    calls = {"ours": partial(launcher(generated), x), "aten": partial(reference_of(generated), x)}
    torch.testing.assert_close(calls["ours"](), calls["aten"](), rtol=1e-5, atol=1e-6)
    return compare(calls, min_time=0.05, rounds=7, max_time=1.0)


def main() -> None:
    """Prints a row per function, and saves them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", default="")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    wanted = {n: f for n, f in functions().items() if not args.only or n in args.only.split(",")}
    table = Table("function", "ours, us", "ATen, us", "ratio", title=f"{ELEMENTS} numbers, {args.threads} threads")
    rows = []
    for name, (function, *parameters) in wanted.items():
        x = args.scale * torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(0))
        x = x.abs() + 1e-3 if function in ABOVE_ZERO else x.sigmoid() if function in BELOW_ONE else x
        x = x.abs() + 1 if function == "acosh" else x
        times = measured(function, tuple(parameters), x)
        ours, aten = (times[who].median for who in ("ours", "aten"))
        rows.append({"function": name, "ours": ours, "aten": aten})
        table.add_row(name, f"{1e6 * ours:.1f}", f"{1e6 * aten:.1f}", f"{ours / aten:.2f}")
    Console().print(table)
    if args.out:
        save_results(args.out, {"environment": environment(), "scale": args.scale, "rows": rows})


if __name__ == "__main__":
    main()
