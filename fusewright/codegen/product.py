"""Kernels of products: those of contractions over views, called with what these are views of, on every target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from fusewright.ir.ops import Reduce
from fusewright.kernel import Argument, Array, Expression, Kernel, Launch
from fusewright.schedule.product import Product


def of_tensors(kernel: Kernel, p: Product) -> Kernel:
    """`kernel`, which was generated for `p.contraction`, with the tensors of `p` for operands."""
    rows = [f"rows_{i}" for i in range(p.x.ndim - 1)]
    samples, positions = (rows[:1], rows[1:]) if p.by_sample else ([], rows)
    names = {"N": " * ".join(samples) or "1", "in_h": "1", "in_w": f"({' * '.join(positions)})"}
    fold = p.root.op
    assert isinstance(fold, Reduce)
    k, places = p.x.shape[1 if p.turned else -1], (0, 2) if p.turned else range(len(rows))
    lengths = [*rows, str(p.root.arg(0).shape[-1])]  # of what is reduced; none is known but the features
    shape = ["1" if i in fold.dims else n for i, n in enumerate(lengths) if fold.keepdim or i not in fold.dims]
    return replace(
        kernel,
        layouts=("contiguous",) * len(kernel.layouts),
        shapes=(
            (rows[0], str(k), rows[1]) if p.turned else (*rows, str(k)),
            *(tuple(map(str, n.shape)) for n in p.tensors[1:]),
        ),
        sizes=tuple((row, 0, i) for row, i in zip(rows, places, strict=True)),
        counts=(f"{' * '.join(positions)} * {k}",),
        output=Array("out", tuple(shape), p.root.dtype),
        scratch=tuple(replace(a, shape=tuple(_renamed(e, names) for e in a.shape)) for a in kernel.scratch),
        launches=tuple(_launch(launch, names) for launch in kernel.launches),
    )


def _launch(launch: Launch, names: Mapping[str, Expression]) -> Launch:
    x, y, z = (_renamed(e, names) for e in launch.grid)
    arguments = (a if a.kind == "pointer" else Argument(a.kind, _renamed(a.text, names)) for a in launch.arguments)
    return replace(launch, grid=(x, y, z), arguments=tuple(arguments))


def _renamed(expression: Expression, names: Mapping[str, Expression]) -> Expression:
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), expression)
