"""Scalar C++ of trees that compare: g++ runs it, and it takes the branch that ATen takes at every step."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fusewright.codegen.cpp import Scalars, compute_type
from fusewright.ir import ops
from fusewright.ir.build import cast, pointwise
from fusewright.ir.node import Graph, Node, make

CPU = torch.device("cpu")
F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
STEP = 0.1  # no number of any of these types, so each rounds it in its own way


def inp(index: int, dtype: torch.dtype, *shape: int) -> Node:
    return make(ops.Input(shape, dtype, CPU, f"a{index}", index))


def x(dtype: torch.dtype) -> Node:
    return inp(0, dtype, 9)


def numbers(dtype: torch.dtype) -> Tensor:
    """Around the step as each type rounds it, and what is special."""
    steps = [float(torch.tensor(STEP, dtype=d)) for d in (F16, BF16, F32, F64)]
    return torch.tensor([*steps, 0.0, -0.0, 1.0, -1.0, float("nan")], dtype=F64).to(dtype)


Case = tuple[Node, Callable[[Tensor, Tensor], Tensor]]
SCALAR = inp(1, F64)  # a tensor without dimensions has no say in the type


def chosen(truth: Node) -> Node:
    return pointwise("where", truth, 1.0, -1.0)


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for dtype in (F16, BF16, F32, F64):
        for fn in COMPARISONS:
            compare = getattr(torch, fn)
            by_number = chosen(pointwise(fn, x(dtype), STEP))
            found[f"{fn} {dtype}"] = by_number, lambda v, _, f=compare: torch.where(f(v, STEP), 1.0, -1.0)
            if dtype in (F32, F64):
                by_scalar = chosen(pointwise(fn, x(dtype), SCALAR))
                found[f"{fn} {dtype} scalar"] = by_scalar, lambda v, s, f=compare: torch.where(f(v, s), 1.0, -1.0)
    positive, large = pointwise("gt", x(F32), 0.0), pointwise("gt", x(F32), 0.05)
    found["cast to bool"] = cast(cast(x(F32), torch.bool), F32), lambda v, _: v.bool().float()
    found["times more than a float"] = pointwise("mul", x(F32), 1e39), lambda v, _: v * 1e39
    found["over less than any float"] = pointwise("div", x(F32), -1e39), lambda v, _: v / -1e39
    both = cast(pointwise("add", positive, large), F32)
    found["bool + bool"] = both, lambda v, _: ((v > 0) + (v > 0.05)).float()
    either = chosen(pointwise("logical_or", pointwise("logical_not", x(F32)), large))
    found["or"] = either, lambda v, _: torch.where(torch.logical_not(v) | (v > 0.05), 1.0, -1.0)
    return found


CASES = cases()


def dtype_of(root: Node) -> torch.dtype:
    """Of the operand with elements."""
    return next(n.dtype for n in Graph((), (root,)).nodes() if isinstance(n.op, ops.Input) and n is not SCALAR)


def function(number: int, root: Node) -> str:
    """C++ of one case: elementwise on operands in their compute types."""
    scalars = Scalars({}, lambda node: "*s" if node is SCALAR else "x[i]")
    result = scalars.value(root)
    body = "\n        ".join([*scalars.lines, f"r[i] = {result};"])
    return f"""extern "C" void f{number}(const {compute_type(dtype_of(root))}* x, const double* s, double* r, long n) {{
    for (long i = 0; i < n; ++i) {{
        {body}
    }}
}}"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("cpp")
    text = "\n".join(function(i, root) for i, (root, _) in enumerate(CASES.values()))
    source: Path = folder / "cases.cpp"
    source.write_text(f"#include <cmath>\nusing namespace std;\n{text}\n")
    subprocess.run(["g++", "-std=c++17", "-O1", "-shared", "-fPIC", source, "-o", folder / "cases.so"], check=True)
    return ctypes.CDLL(str(folder / "cases.so"))


@pytest.mark.parametrize("name", CASES)
def test_the_branch_is_atens(library: ctypes.CDLL, name: str) -> None:
    root, expected = CASES[name]
    dtype = dtype_of(root)
    values, scalar = numbers(dtype), torch.tensor(STEP, dtype=F64)
    given = values.to(F64 if dtype == F64 else F32)
    got = torch.empty(len(values), dtype=F64)
    run = getattr(library, f"f{[*CASES].index(name)}")
    run(*(ctypes.c_void_p(t.data_ptr()) for t in (given, scalar, got)), ctypes.c_long(len(values)))
    want = expected(values, scalar).double()
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
