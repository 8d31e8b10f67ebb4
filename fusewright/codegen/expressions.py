"""The text of each operation in ATen calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch

from fusewright.codegen import ranges
from fusewright.ir import ops
from fusewright.ir.fused import Fused
from fusewright.ir.node import Node

Emitter = Callable[[Node, Sequence[str | None], str], Sequence[str]]
EMITTERS: dict[type[ops.Op], Emitter] = {}


def repr_number(value: Any) -> str:
    """Python text of a number, non-finite ones included."""
    if isinstance(value, float) and value != value:
        return 'float("nan")'
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return f'float("{value}")'
    return repr(value) if not isinstance(value, int | float) or value >= 0 else f"({value!r})"


def _emits(*kinds: type[ops.Op]) -> Callable[[Callable[[Any, Any, Any], str]], Callable[[Any, Any, Any], str]]:
    """Register a function (op, node, operand texts) -> expression for operations of these kinds."""

    def register(expression: Callable[[Any, Any, Any], str]) -> Callable[[Any, Any, Any], str]:
        for kind in kinds:
            EMITTERS[kind] = lambda node, args, name: [f"{name} = {expression(node.op, node, args)}"]
        return expression

    return register


def _pairs(values: Sequence[int]) -> str:
    """An attribute per dimension, as one number where all agree."""
    return str(values[0]) if len(set(values)) == 1 else str(tuple(values))


def _options(**given: tuple[Any, Any]) -> str:
    """Keyword arguments that differ from their defaults, from name=(value text, is default)."""
    return "".join(f", {name}={text}" for name, (text, default) in given.items() if not default)


@_emits(ops.Conv)
def _conv(op: ops.Conv, node: Node, args: Sequence[str]) -> str:
    n = len(op.stride)
    x, both = args[0], [min(p) for p in op.padding]  # PyTorch pads both sides alike, or crops them if transposed
    beyond = [side - each for p, each in reversed([*zip(op.padding, both, strict=True)]) for side in p]
    if not op.transposed and (any(beyond) or min(both) < 0):
        x, both = f"F.pad({x}, {[q for p in reversed(op.padding) for q in p]})", [0] * n
    options = _options(
        stride=(_pairs(op.stride), set(op.stride) == {1}),
        padding=(_pairs(both), not any(both)),
        output_padding=(_pairs(op.output_padding or (0,)), not any(op.output_padding)),
        groups=(op.groups, op.groups == 1),
        dilation=(_pairs(op.dilation), set(op.dilation) == {1}),
    )
    function = f"F.conv_transpose{n}d" if op.transposed else f"F.conv{n}d"
    bias = "" if args[2] is None else f", {args[2]}"
    y = f"{function}({x}, {args[1]}{bias}{options})"
    return f"F.pad({y}, {[-q for q in beyond]})" if any(beyond) and op.transposed else y


@_emits(ops.ConvLast)
def _conv_last(op: ops.ConvLast, node: Node, args: Sequence[str]) -> str:
    operands = [
        *args[:2],
        *(f"{name}={text}" for name, text in zip(("bias", "residual"), args[2:], strict=True) if text),
    ]
    options = _options(
        stride=(_pairs(op.stride), set(op.stride) == {1}),
        padding=(_pairs(op.padding), not any(op.padding)),
        dilation=(_pairs(op.dilation), set(op.dilation) == {1}),
        groups=(op.groups, op.groups == 1),
        relu=(op.relu, not op.relu),
    )
    return f"conv_last({', '.join(operands)}{options})"


@_emits(ops.Matmul)
def _matmul(op: ops.Matmul, node: Node, args: Sequence[str]) -> str:
    x, w, bias = args
    if len(node.arg(1).shape) == 2 and op.transpose_w:
        return f"F.linear({x}, {w}{'' if bias is None else f', {bias}'})"
    if len(node.arg(0).shape) == 2 and len(node.arg(1).shape) == 2 and bias is not None:
        return f"torch.addmm({bias}, {x}, {w})"
    if bias is None and op.is_grouped(node.arg(0).shape, node.arg(1).shape):  # `@` would copy w for every sample
        return f"torch.einsum('ngmk,gok->ngmo', {x}, {w}).contiguous()"
    product = f"{x} @ {w}{'.mT' if op.transpose_w else ''}"
    return product if bias is None else f"{product} + {bias}"


@_emits(ops.Pool)
def _pool(op: ops.Pool, node: Node, args: Sequence[str]) -> str:
    merged = _as_image(op, node.arg(0)) if op.kind == "avg" else None
    if merged is not None:
        op, first, sizes = merged
        image = f"{args[0]}.flatten({first}, {first + 1}).contiguous()"  # volumes' averages lie row by row
        return f"{_windows(op, image)}.unflatten({first + 1}, {sizes})"
    return _windows(op, args[0])


def _windows(op: ops.Pool, x: str) -> str:
    """The call for windows over x."""
    options = _options(
        stride=(_pairs(op.stride), op.stride == op.kernel),
        padding=(_pairs(op.padding), not any(op.padding)),
        dilation=(_pairs(op.dilation), set(op.dilation) == {1}),
        ceil_mode=(op.ceil_mode, not op.ceil_mode),
        count_include_pad=(op.count_include_pad, op.count_include_pad or op.kind != "avg"),
        divisor_override=(op.divisor, op.divisor is None),
    )
    sign, function = ("-", "max") if op.kind == "min" else ("", op.kind)
    return f"{sign}F.{function}_pool{len(op.kernel)}d({sign}{x}, {_pairs(op.kernel)}{options})"


def _as_image(op: ops.Pool, x: Node) -> tuple[ops.Pool, int, tuple[int, int]] | None:
    """Windows over volumes that have one element along two neighbouring axes as windows over images: the pooling, the
    first of these axes, counted from the end, and the lengths of both; `None` where there are none.

    What PyTorch adds atomically in the gradient of volumes, in any order, it gathers in that of images.
    """
    for axis in range(len(op.kernel) - 1) if len(op.kernel) == 3 else ():
        both, lengths = slice(axis, axis + 2), x.shape[axis - 3 : axis - 1 or None]
        along = (*op.kernel[both], *op.stride[both], *(p + 1 for p in op.padding[both]))
        unknown = [d for d in lengths if not isinstance(d, int)]
        if set(along) == {1} and len(unknown) < 2:
            fields = (op.kernel, op.stride, op.padding, op.dilation)
            kernel, stride, padding, dilation = ((*values[:axis], *values[axis + 1 :]) for values in fields)
            image = replace(op, kernel=kernel, stride=stride, padding=padding, dilation=dilation)
            first, second = (d if isinstance(d, int) else -1 for d in lengths)
            return image, axis - 3, (first, second)
    return None


def _range_sum(node: Node, args: Sequence[str | None], name: str) -> Sequence[str]:
    assert isinstance(node.op, ops.RangeSum) and args[0] is not None
    return ranges.lines(node.op, node.arg(0), args[0], name)


EMITTERS[ops.RangeSum] = _range_sum


@_emits(ops.Pointwise)
def _pointwise(op: ops.Pointwise, node: Node, args: Sequence[str]) -> str:
    return op.traits.torch.format(*args)


@_emits(ops.Cross)
def _cross(op: ops.Cross, node: Node, args: Sequence[str]) -> str:
    return f"torch.linalg.cross({args[0]}, {args[1]}, dim={op.dim})"


@_emits(ops.Cast)
def _cast(op: ops.Cast, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.to({op.dtype})"


@_emits(ops.Detach)
def _detach(op: ops.Detach, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.detach()"


@_emits(ops.Transfer)
def _transfer(op: ops.Transfer, node: Node, args: Sequence[str]) -> str:
    # A product passes the number along with its launch: a copy would wait for the device, and CUDA graphs refuse it.
    return f'torch.ones((), dtype={node.dtype}, device="{op.device}") * {args[0]}'


@_emits(ops.Reduce)
def _reduce(op: ops.Reduce, node: Node, args: Sequence[str]) -> str:
    x, dims = args[0], op.dims[0] if len(op.dims) == 1 else op.dims
    keep = ", keepdim=True" if op.keepdim else ""
    cast = f", dtype={op.dtype}" if op.dtype is not None else ""
    match op.kind:
        case "max" | "min" if op.first:
            return _first(op, x, keep)
        case "max" | "min":
            return f"torch.a{op.kind}({x}, {dims}{keep})"
        case "logsumexp":
            return f"torch.logsumexp({x}, {dims}{keep})"
        case "var" | "std":
            return f"torch.{op.kind}({x}, {dims}, correction={op.correction:g}{keep})"
        case "norm":
            return f"torch.linalg.vector_norm({x}, dim={dims}{keep})"
        case "prod":
            return _product(op, x, keep, cast)
        case "argmax" | "argmin":
            return _index(op, node.arg(0), x, keep)
        case _:
            return f"{x}.{op.kind}({dims}{keep}{cast})"


def _first(op: ops.Reduce, x: str, keep: str) -> str:
    """`torch.max` takes one dimension, as which neighbours are seen."""
    begin, end = op.dims[0], op.dims[-1]
    if begin == end:
        return f"torch.{op.kind}({x}, {begin}{keep}).values"
    ones = f".unflatten({begin}, {(1,) * len(op.dims)})" if op.keepdim else ""
    return f"torch.{op.kind}({x}.flatten({begin}, {end}), {begin}{keep}).values{ones}"


@_emits(ops.Extreme)
def _extreme(op: ops.Extreme, node: Node, args: Sequence[str]) -> str:
    return f"torch.{op.kind}({args[0]}, {op.dim}{', keepdim=True' if op.keepdim else ''})"


def _product(op: ops.Reduce, x: str, keep: str, cast: str) -> str:
    """`torch.prod` takes one dimension at a time."""
    for dim in reversed(op.dims):
        x = f"torch.prod({x}, {dim}{keep}{cast})"
    return x


def _index(op: ops.Reduce, of: Node, x: str, keep: str) -> str:
    """ATen looks along one dimension, or through all."""
    first, count = op.dims[0], len(op.dims)
    if count == of.ndim:
        return f"torch.{op.kind}({x}, dim=None{keep})" if keep or count > 1 else f"torch.{op.kind}({x}, 0)"
    if count == 1:
        return f"torch.{op.kind}({x}, {first}{keep})"
    found = f"torch.{op.kind}({x}.flatten({first}, {op.dims[-1]}), {first}{keep})"
    return f"{found}.unflatten({first}, {(1,) * count})" if keep else found


@_emits(ops.Attention)
def _attention(op: ops.Attention, node: Node, args: Sequence[str]) -> str:
    options = _options(mask=(args[3], args[3] is None), scale=(op.scale, False), turned=(op.turned, not op.turned))
    return f"attention({', '.join(args[:3])}{options})"


@_emits(ops.Scan)
def _scan(op: ops.Scan, node: Node, args: Sequence[str]) -> str:
    cast = f", dtype={op.dtype}" if op.dtype is not None else ""
    match op.kind:
        case "max" | "min":
            return f"torch.cum{op.kind}({args[0]}, {op.dim})[0]"
        case "logsumexp":
            return f"torch.logcumsumexp({args[0]}, {op.dim})"
    return f"torch.cum{op.kind}({args[0]}, {op.dim}{cast})"


@_emits(ops.Softmax)
def _softmax(op: ops.Softmax, node: Node, args: Sequence[str]) -> str:
    return f"F.{'log_' if op.log else ''}softmax({args[0]}, dim={op.dim})"


@_emits(ops.Norm)
def _norm(op: ops.Norm, node: Node, args: Sequence[str]) -> str:
    x, weight, bias, mean, var = args
    trailing = f"({', '.join(map(str, node.shape[-op.trailing :]))},)"
    match op.kind:
        case "batch":
            return f"F.batch_norm({x}, {mean}, {var}, {weight}, {bias}, {op.training}, {op.momentum!r}, {op.eps!r})"
        case "instance":
            return f"F.instance_norm({x}, {mean}, {var}, {weight}, {bias}, {op.training}, {op.momentum!r}, {op.eps!r})"
        case "group":
            return f"F.group_norm({x}, {op.groups}, {weight}, {bias}, {op.eps!r})"
        case "layer":
            return f"F.layer_norm({x}, {trailing}, {weight}, {bias}, {op.eps!r})"
        case "rms":
            return f"F.rms_norm({x}, {trailing}, {weight}, {op.eps!r})"


def _statistics(node: Node, args: Sequence[str | None], name: str) -> Sequence[str]:
    op, x = node.op, node.arg(0)
    assert isinstance(op, ops.Statistics)
    dims = (0, *range(2, x.ndim))
    value = str(args[0]) if x.dtype == node.dtype else f"{args[0]}.to({node.dtype})"
    variance, mean, count = (f"{name}[{i}]" for i in range(3))
    taken = f"{mean} * {op.momentum!r}, {variance} * ({op.momentum!r} * {count} / ({count} - 1))"
    rows = f"{mean}, torch.rsqrt({variance} + {op.eps!r}), {taken}"
    return [
        f"{name} = (*torch.var_mean({value}, {dims}, correction=0), {args[0]}.numel() / {args[0]}.shape[1])",
        f"{name} = torch.stack(({rows}))",
    ]


def _track(node: Node, args: Sequence[str | None], name: str) -> Sequence[str]:
    op, (*given, mean, variance) = node.op, args
    assert isinstance(op, ops.Track)
    keep = f"{1 - op.momentum!r}"
    # In the type of the statistics of the batch: a narrower one is rounded to once, when they are written.
    pairs = zip(given, (mean, variance), strict=True)
    taken = (f"torch.add({found}.detach(), {to}, alpha={keep}, out={to})" for found, to in pairs)
    return [f"{name} = ({', '.join(taken)})"]


EMITTERS[ops.Statistics] = _statistics
EMITTERS[ops.Track] = _track


@_emits(ops.Dropout)
def _dropout(op: ops.Dropout, node: Node, args: Sequence[str]) -> str:
    return f"F.dropout({args[0]}, {op.p!r}, True)"


@_emits(ops.Reshape)
def _reshape(op: ops.Reshape, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.reshape({_tuple(op.shape)})"


@_emits(ops.Expand)
def _expand(op: ops.Expand, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.expand({_tuple(op.shape)})"


def _tuple(values: Sequence[Any]) -> str:
    return f"({', '.join(map(str, values))}{',' if len(values) == 1 else ''})"


@_emits(ops.Permute)
def _permute(op: ops.Permute, node: Node, args: Sequence[str]) -> str:
    view = args[0] if op.dims == tuple(range(len(op.dims))) else f"{args[0]}.permute{op.dims}"
    return f"{view}.contiguous()" if op.copy else view


@_emits(ops.Slice)
def _slice(op: ops.Slice, node: Node, args: Sequence[str]) -> str:
    step = "" if op.step == 1 else f":{op.step}"
    whole = op.stop == node.arg(0).shape[op.dim]
    return f"{args[0]}[{':, ' * op.dim}{op.start or ''}:{'' if whole else op.stop}{step}]"


@_emits(ops.Windows)
def _windows_along(op: ops.Windows, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}.unfold({op.dim}, {op.size}, {op.step})"


@_emits(ops.Unfold)
def _unfold(op: ops.Unfold, node: Node, args: Sequence[str]) -> str:
    return f"F.unfold({args[0]}, {_grid(op.grid)})"


@_emits(ops.Fold)
def _fold(op: ops.Fold, node: Node, args: Sequence[str]) -> str:
    return f"F.fold({args[0]}, {op.lengths}, {_grid(op.grid)})"


def _grid(grid: ops.Grid) -> str:
    options = _options(
        dilation=(_pairs(grid.dilation), set(grid.dilation) == {1}),
        padding=(_pairs(grid.padding), not any(grid.padding)),
        stride=(_pairs(grid.stride), set(grid.stride) == {1}),
    )
    return f"{_pairs(grid.kernel)}{options}"


@_emits(ops.Roll)
def _roll(op: ops.Roll, node: Node, args: Sequence[str]) -> str:
    dims, places = zip(*op.shifts, strict=True)
    return f"torch.roll({args[0]}, {_tuple(places)}, {_tuple(dims)})"


@_emits(ops.Flip)
def _flip(op: ops.Flip, node: Node, args: Sequence[str]) -> str:
    return f"torch.flip({args[0]}, {_tuple(op.dims)})"


@_emits(ops.Upsample)
def _upsample(op: ops.Upsample, node: Node, args: Sequence[str]) -> str:
    return f"F.interpolate({args[0]}, {_tuple(op.lengths)})"


@_emits(ops.Interpolate)
def _interpolate(op: ops.Interpolate, node: Node, args: Sequence[str]) -> str:
    mode = "bicubic" if op.kind == "cubic" else ("linear", "bilinear", "trilinear")[len(op.lengths) - 1]
    options = _options(align_corners=(op.aligned, not op.aligned))
    return f'F.interpolate({args[0]}, {_tuple(op.lengths)}, mode="{mode}"{options})'


@_emits(ops.Cat)
def _cat(op: ops.Cat, node: Node, args: Sequence[str]) -> str:
    return f"torch.cat(({', '.join(args)},), {op.dim})"


@_emits(ops.Embedding)
def _embedding(op: ops.Embedding, node: Node, args: Sequence[str]) -> str:
    if op.wraps:
        return f"{args[0]}[{args[1]}]"
    options = _options(
        padding_idx=(op.padding_idx, op.padding_idx < 0),
        scale_grad_by_freq=(op.scale_grad_by_freq, not op.scale_grad_by_freq),
        sparse=(op.sparse, not op.sparse),
    )
    return f"F.embedding({args[1]}, {args[0]}{options})"


@_emits(ops.Nll)
def _nll(op: ops.Nll, node: Node, args: Sequence[str]) -> str:
    if op.ignore == ops.NEVER and op.reduction == "none" and args[2] is None:
        # as it was captured: gradients of nll_loss want contiguous images on a GPU
        return f"-{args[0]}.gather(1, {args[1]}.unsqueeze(1)).squeeze(1)"
    options = _options(
        weight=(args[2], args[2] is None),
        ignore_index=(op.ignore, op.ignore == -100),
        reduction=(f'"{op.reduction}"', op.reduction == "mean"),
    )
    return f"F.nll_loss({args[0]}, {args[1]}{options})"


@_emits(ops.Pad)
def _pad(op: ops.Pad, node: Node, args: Sequence[str]) -> str:
    first = min(dim for dim, _, _ in op.pads)
    amounts = {dim: (left, right) for dim, left, right in op.pads}
    pads = [n for dim in range(node.ndim - 1, first - 1, -1) for n in amounts.get(dim, (0, 0))]
    mode = f", value={repr_number(op.value)}" if op.mode == "constant" else f', mode="{op.mode}"'
    return f"F.pad({args[0]}, {tuple(pads)}{mode if mode != ', value=0.0' else ''})"


@_emits(ops.Full)
def _full(op: ops.Full, node: Node, args: Sequence[str]) -> str:
    return f'torch.full({_tuple(op.shape)}, {repr_number(op.value)}, dtype={op.dtype}, device="{op.device}")'


@_emits(ops.Vector)
def _vector(op: ops.Vector, node: Node, args: Sequence[str]) -> str:
    return f'torch.tensor({list(op.values)}, dtype={op.dtype}, device="{op.device}")'


@_emits(ops.Positions)
def _positions(op: ops.Positions, node: Node, args: Sequence[str]) -> str:
    end = op.start + op.step * op.length
    ends = f"{end}" if (op.start, op.step) == (0, 1) else f"{op.start}, {end}, {op.step}"
    found = f'torch.arange({ends}, dtype={op.dtype}, device="{op.device}")'
    return found if op.modulo is None else f"{found} % {op.modulo}"


@_emits(ops.Item)
def _item(op: ops.Item, node: Node, args: Sequence[str]) -> str:
    return f"{args[0]}[{op.index}]"


@_emits(Fused)
def _fused(op: Fused, node: Node, args: Sequence[str]) -> str:
    return f"{op.name}({', '.join(args)})"


@_emits(ops.Opaque)
def _opaque(op: ops.Opaque, node: Node, args: Sequence[str]) -> str:
    positional = [_literal(a, args) for a in op.arguments]
    keywords = [f"{name}={_literal(a, args)}" for name, a in op.keywords]
    return f"torch.ops.{op.target}({', '.join(positional + keywords)})"


def _literal(value: Any, args: Sequence[str]) -> str:
    """Python text of an argument of an opaque call."""
    if isinstance(value, ops.Arg):
        return args[value.index]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_literal(v, args) for v in value)}]"
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    if isinstance(value, float):
        return repr_number(value)
    return repr(value) if isinstance(value, str) else str(value)
