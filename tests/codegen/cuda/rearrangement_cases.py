"""Elements that lie elsewhere than they did, and functions of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from codegen.cuda.test_stream_kernels import inp

from fusewright.ir import ops
from fusewright.ir.build import permute, pointwise, reshape
from fusewright.ir.node import Node, make

CPU = torch.device("cpu")


def cat(dim: int, *parts: Node) -> Node:
    return make(ops.Cat(dim), *parts)


def taken(x: Node, dim: int, start: int, stop: int, step: int = 1) -> Node:
    return make(ops.Slice(dim, start, stop, step), x)


def pooled(kind: Literal["max", "min", "avg"], x: Node, *kernel: int) -> Node:
    none, one = (0,) * len(kernel), (1,) * len(kernel)
    return make(ops.Pool(kind, kernel, kernel, none, one), x)


def shuffled(x: Node, groups: int) -> Node:
    n, c, *rest = x.shape
    assert isinstance(c, int)
    apart = reshape(x, (n, groups, c // groups, *rest))
    return reshape(permute(apart, (0, 2, 1, *range(3, apart.ndim))), x.shape)


def pixels(x: Node, r: int) -> Node:
    n, c, h, w = x.shape
    assert isinstance(c, int) and isinstance(h, int) and isinstance(w, int)
    apart = reshape(x, (n, c // r**2, r, r, h, w))
    return reshape(permute(apart, (0, 1, 4, 2, 5, 3)), (n, c // r**2, h * r, w * r))


def windows(x: Node, side: int) -> Node:
    """(N, H, W, C), rolled, in windows of side x side positions."""
    n, h, w, c = x.shape
    assert isinstance(n, int) and isinstance(h, int) and isinstance(w, int) and isinstance(c, int)
    rolled = make(ops.Roll(((1, -2), (2, -1))), x)
    apart = reshape(rolled, (n, h // side, side, w // side, side, c))
    return reshape(permute(apart, (0, 1, 3, 2, 4, 5)), (n * h // side * w // side, side * side, c))


def turned(x: Node, c: Node, s: Node) -> Node:
    """A rotary embedding whose halves are interleaved."""
    length = x.shape[-1]
    assert isinstance(length, int)
    one, other = (taken(x, x.ndim - 1, k, length, 2) for k in (0, 1))
    first = pointwise("sub", pointwise("mul", one, c), pointwise("mul", other, s))
    second = pointwise("add", pointwise("mul", one, s), pointwise("mul", other, c))
    single = (*first.shape, 1)
    return reshape(cat(x.ndim, reshape(first, single), reshape(second, single)), x.shape)


def crossed(a: Node, b: Node, dim: int) -> Node:
    return make(ops.Cross(dim), a, b)


def twice_crossed(q: Node, x: Node) -> Node:
    """Vectors that quaternions turn, but for what is added and a factor."""
    u, w = taken(q, 1, 0, 3), taken(q, 1, 3, 4)
    return crossed(u, pointwise("add", crossed(u, x, 1), pointwise("mul", w, x)), 1)


def upsampled(x: Node, *factors: int) -> Node:
    return resampled(x, *(n * k for n, k in zip(x.shape[2:], factors, strict=True)))  # type: ignore[arg-type]


def resampled(x: Node, *lengths: int) -> Node:
    return make(ops.Upsample(lengths), x)


def interpolated(x: Node, *lengths: int, aligned: bool = False, kind: Literal["linear", "cubic"] = "linear") -> Node:
    return make(ops.Interpolate(lengths, aligned, kind), x)


def padded(x: Node, *pads: tuple[int, int, int], value: float = 0.0) -> Node:
    return make(ops.Pad(pads, "constant", value), x)


def along(x: Node, dim: int, size: int, step: int) -> Node:
    return make(ops.Windows(dim, size, step), x)


def grid(
    kernel: tuple[int, int], dilation: tuple[int, int] = (1, 1), padding: tuple[int, int] = (0, 0),
    stride: tuple[int, int] = (1, 1),
) -> ops.Grid:  # fmt: skip
    return ops.Grid(kernel, dilation, padding, stride)


def unfolded(x: Node, *given: tuple[int, int]) -> Node:
    return make(ops.Unfold(grid(*given)), x)


def folded(x: Node, lengths: tuple[int, int], *given: tuple[int, int]) -> Node:
    return make(ops.Fold(lengths, grid(*given)), x)


def again(x: Node, *given: tuple[int, int]) -> Node:
    """Windows of x, weighed tap by tap, added up where they were."""
    columns = unfolded(x, *given)
    lengths = x.shape[2:]
    return folded(pointwise("mul", columns, inp(1, columns.shape[1], 1)), lengths, *given)  # type: ignore[arg-type]


X = inp(0, 2, 8, 4, 8)
Y = inp(0, 2, 3, 2, 4, 16)
CASES: dict[str, Callable[[], Node]] = {
    "channels shuffled": lambda: pointwise("relu", shuffled(X, 4)),
    "channels shuffled, odd rows": lambda: pointwise("relu", shuffled(inp(0, 2, 6, 3, 5), 2)),
    "pixels shuffled": lambda: pixels(pointwise("relu", X), 2),
    "pixels shuffled by three": lambda: pointwise("tanh", pixels(inp(0, 1, 9, 2, 3), 3)),
    "windows": lambda: windows(inp(0, 2, 4, 8, 12), 2),
    "windows and a function": lambda: pointwise("exp", windows(inp(0, 1, 6, 3, 5), 3)),
    "biased, and masked by windows": lambda: pointwise(
        "add",
        reshape(pointwise("add", inp(0, 6, 3, 4, 8), inp(1, 1, 3, 4, 8)), (2, 3, 3, 4, 8)),
        inp(2, 1, 3, 1, 4, 8),
    ),
    "in another shape, odd": lambda: pointwise("tanh", reshape(pointwise("mul", inp(0, 3, 35), inp(1, 35)), (3, 5, 7))),
    "rolled beside itself": lambda: pointwise("add", make(ops.Roll(((1, 3), (2, 5))), X), X),
    "rolled along rows": lambda: pointwise("add", make(ops.Roll(((3, 4),)), X), inp(1, 8, 1, 1)),
    "rolled twice": lambda: make(ops.Roll(((1, 4),)), pointwise("exp", make(ops.Roll(((1, 3), (3, 1))), X))),
    "rolled back": lambda: pointwise("neg", make(ops.Roll(((3, -2),)), pointwise("exp", make(ops.Roll(((3, 2),)), X)))),
    "crossed": lambda: crossed(inp(0, 40, 3), inp(1, 40, 3), 1),
    "crossed in front": lambda: pointwise("neg", crossed(inp(0, 3, 5, 8), inp(1, 3, 1, 8), 0)),
    "crossed twice": lambda: twice_crossed(inp(0, 40, 4), inp(1, 40, 3)),
    "rolled along rows, by one": lambda: pointwise("neg", make(ops.Roll(((3, 1),)), X)),
    "flipped": lambda: pointwise("add", make(ops.Flip((3,)), X), X),
    "flipped planes": lambda: pointwise("mul", make(ops.Flip((1, 2)), X), 2.0),
    "upsampled": lambda: pointwise("add", upsampled(pointwise("relu", X), 2, 2), inp(1, 8, 8, 16)),
    "upsampled by eight": lambda: upsampled(pointwise("tanh", X), 1, 8),
    "upsampled by three": lambda: upsampled(inp(0, 2, 3, 5), 3),
    "resampled": lambda: pointwise("relu", resampled(X, 10, 12)),
    "resampled to less": lambda: resampled(X, 3, 6),
    "interpolated": lambda: interpolated(X, 8, 16),
    "interpolated, corners aligned": lambda: pointwise("relu", interpolated(pointwise("tanh", X), 7, 20, aligned=True)),
    "interpolated to odd lengths": lambda: pointwise("mul", interpolated(X, 11, 13), inp(1, 8, 11, 13)),
    "interpolated to less": lambda: interpolated(inp(0, 2, 3, 9, 16), 4, 12),
    "every other": lambda: pointwise("relu", taken(X, 3, 1, 8, 2)),
    "every other, odd rows": lambda: pointwise("relu", taken(inp(0, 7, 15), 1, 0, 15, 2)),
    "every other, of odd rows": lambda: pointwise("relu", taken(inp(0, 64, 17), 1, 0, 16, 2)),
    "every other of all": lambda: pointwise("relu", taken(inp(0, 15), 0, 0, 15, 2)),
    "pooled twice": lambda: pointwise("sub", pooled("max", X, 2, 2), pooled("min", X, 2, 2)),
    "pooled twice, 3-d": lambda: pointwise("add", pooled("avg", Y, 1, 2, 2), pooled("max", Y, 1, 2, 2)),
    "pooled rows": lambda: cat(1, pooled("max", inp(0, 2, 3, 48), 3), pooled("avg", inp(0, 2, 3, 48), 3)),
    "interpolated by cubes": lambda: pointwise("clamp", interpolated(X, 8, 16, kind="cubic"), params=(0.0, 1.0)),
    "interpolated by cubes, corners aligned": lambda: interpolated(X, 7, 20, aligned=True, kind="cubic"),
    "interpolated by cubes to odd lengths": lambda: pointwise("tanh", interpolated(X, 11, 13, kind="cubic")),
    "interpolated by cubes to less": lambda: interpolated(inp(0, 2, 3, 9, 17), 4, 5, kind="cubic"),
    "interpolated by cubes along one of two": lambda: interpolated(X, 12, 8, kind="cubic"),
    "interpolated by cubes of one": lambda: interpolated(inp(0, 2, 3, 1, 1), 3, 4, kind="cubic"),
    "interpolated by cubes to one": lambda: interpolated(X, 1, 1, kind="cubic"),
    "interpolated along rows": lambda: pointwise("add", interpolated(inp(0, 2, 3, 8), 24), 1.0),
    "interpolated along one of two": lambda: interpolated(X, 12, 8),
    "interpolated volumes": lambda: interpolated(inp(0, 2, 3, 2, 3, 4), 4, 5, 8, aligned=True),
    "interpolated between one": lambda: interpolated(inp(0, 2, 3, 1, 1), 4, 8),
    "interpolated to few": lambda: interpolated(X, 4, 3, aligned=True),
    "interpolated, then turned": lambda: pointwise(
        "relu", interpolated(permute(inp(0, 2, 40, 3, 9), (0, 3, 2, 1)), 5, 48)
    ),
    "interpolated twice": lambda: interpolated(pointwise("neg", interpolated(X, 6, 8)), 6, 12),
    "interpolated, padded and upsampled": lambda: interpolated(upsampled(padded(X, (2, 1, 0)), 1, 2), 10, 24),
    "interpolated beside what is not": lambda: cat(1, interpolated(X, 8, 16), inp(1, 2, 3, 8, 16)),
    "repeated": lambda: reshape(make(ops.Expand((2, 8, 4, 3, 8)), reshape(X, (2, 8, 4, 1, 8))), (2, 8, 12, 8)),
    "interleaved halves": lambda: turned(inp(0, 2, 3, 4, 16), inp(1, 4, 8), inp(2, 4, 8)),
    "functions side by side": lambda: cat(1, pointwise("relu", X), pointwise("relu", pointwise("neg", X))),
    "functions in a row": lambda: cat(1, pointwise("sin", inp(0, 5, 12)), pointwise("cos", inp(0, 5, 12))),
    "parts of odd lengths": lambda: cat(
        1, pointwise("sin", inp(0, 5, 7)), inp(1, 5, 2), pointwise("exp", taken(inp(2, 5, 9), 1, 4, 8))
    ),
    "a part of a part": lambda: pointwise(
        "tanh", cat(1, cat(2, inp(0, 2, 3, 4), inp(1, 2, 3, 8)), pointwise("neg", inp(2, 2, 5, 12)))
    ),
    "every other one": lambda: pointwise("mul", taken(inp(0, 5, 24), 1, 1, 24, 2), inp(1, 12)),
    "padded": lambda: pointwise("add", padded(inp(0, 2, 3, 8), (1, 1, 2), (2, 4, 4)), 1.0),
    "padded by little": lambda: padded(pointwise("relu", inp(0, 2, 3, 7)), (2, 1, 2), value=-2.5),
    **{
        f"padded, {mode}": lambda mode=mode: pointwise(  # type: ignore[misc]
            "tanh", make(ops.Pad(((2, 2, 1), (3, 3, 4)), mode), inp(0, 2, 3, 5, 8))
        )
        for mode in ("reflect", "replicate", "circular")
    },
    "padded, then turned": lambda: pointwise("relu", shuffled(padded(inp(0, 2, 5, 8), (1, 1, 0)), 2)),
    "heads side by side": lambda: pointwise(
        "tanh", reshape(permute(inp(0, 2, 3, 4, 8), (0, 2, 1, 3)), (2, 4, 24))
    ),
    "turned": lambda: pointwise("tanh", permute(inp(0, 2, 40, 70), (0, 2, 1), copy=True)),
    "turned planes": lambda: permute(inp(0, 2, 40, 3, 9), (0, 2, 3, 1), copy=True),
    "turned, one plane": lambda: pointwise("neg", permute(inp(0, 33, 65), (1, 0), copy=True)),
    "turned beside what is not": lambda: pointwise(
        "add", permute(pointwise("exp", inp(0, 2, 40, 9, 8)), (0, 2, 3, 1), copy=True), inp(1, 9, 8, 40)
    ),
    "two that are turned": lambda: pointwise(
        "mul", *(permute(inp(k, 2, 40, 72), (0, 2, 1), copy=True) for k in (0, 1))
    ),
    "frames": lambda: pointwise("mul", along(inp(0, 2, 50), 1, 12, 4), inp(1, 12)),
    "frames, odd": lambda: pointwise("tanh", along(pointwise("neg", inp(0, 3, 41)), 1, 7, 3)),
    "frames with gaps": lambda: pointwise("exp", along(inp(0, 2, 41), 1, 3, 5)),
    "windows in two dimensions": lambda: reshape(
        permute(along(along(padded(X, (2, 1, 1), (3, 1, 1)), 2, 3, 1), 3, 3, 1), (0, 1, 4, 5, 2, 3)), (2, 72, 32)
    ),
    "unfolded": lambda: unfolded(X, (3, 3), (1, 1), (1, 1)),
    "unfolded without padding": lambda: pointwise("tanh", unfolded(X, (2, 3))),
    "unfolded, in steps": lambda: unfolded(pointwise("exp", inp(0, 2, 3, 9, 16)), (3, 2), (1, 2), (2, 1), (2, 1)),
    "unfolded, in patches": lambda: pointwise("neg", unfolded(inp(0, 2, 3, 8, 16), (4, 8), (1, 1), (0, 0), (4, 8))),
    "unfolded, one window": lambda: pointwise("neg", unfolded(inp(0, 2, 3, 3, 4), (3, 4))),
    "unfolded, then apart": lambda: reshape(
        permute(reshape(unfolded(X, (3, 3), (1, 1), (1, 1)), (2, 8, 9, 32)), (0, 3, 1, 2)), (2, 32, 72)
    ),
    "folded": lambda: folded(inp(0, 2, 27, 40), (5, 8), (3, 3), (1, 1), (1, 1)),
    "folded, in steps": lambda: folded(inp(0, 2, 27, 20), (9, 7), (3, 3), (1, 1), (1, 1), (2, 2)),
    "folded, taps apart": lambda: folded(pointwise("exp", inp(0, 2, 27, 48)), (8, 6), (3, 3), (2, 2), (2, 2)),
    "folded, steps and taps apart": lambda: folded(inp(0, 2, 27, 25), (9, 11), (3, 3), (2, 2), (0, 1), (1, 2)),
    "folded, steps and taps of no common factor": lambda: folded(
        inp(0, 2, 15, 21), (11, 13), (3, 5), (2, 2), (1, 1), (3, 1)
    ),
    "folded, few elements of a window": lambda: folded(inp(0, 1, 12, 9), (6, 8), (2, 2), (1, 1), (1, 0), (3, 3)),
    "folded, patches": lambda: pointwise("relu", folded(inp(0, 2, 48, 12), (8, 24), (4, 4), (1, 1), (0, 0), (4, 4))),
    "folded, one window": lambda: pointwise("neg", folded(inp(0, 2, 36, 1), (3, 4), (3, 4))),
    "unfolded and folded": lambda: again(X, (3, 3), (1, 1), (1, 1)),
    "unfolded and folded, in steps": lambda: again(inp(0, 2, 3, 9, 8), (3, 4), (1, 1), (1, 2), (2, 2)),
    "unfolded and folded, taps apart": lambda: pointwise("tanh", again(inp(0, 2, 3, 9, 8), (3, 3), (2, 2), (2, 1))),
    "a mask": lambda: pointwise(
        "where", shuffled(inp(0, 2, 4, 8, dtype=torch.bool), 2), inp(1, 2, 4, 8), 0.0
    ),
}  # fmt: skip
