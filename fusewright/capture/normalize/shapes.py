"""Operations that move elements: reshapes, permutations, slices, concatenations, padding, embeddings; and casts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any, Literal

import torch

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.build import squeezed
from fusewright.ir.node import Node
from fusewright.ir.ops import (
    Cast,
    Cat,
    Detach,
    Embedding,
    Expand,
    Flip,
    Fold,
    Full,
    Grid,
    Interpolate,
    Op,
    Pad,
    Permute,
    Positions,
    Reduce,
    Reshape,
    Roll,
    Size,
    Slice,
    Unfold,
    Upsample,
    Windows,
)

_ROW_MAJOR = (torch.contiguous_format, 0)  # the number is what a schema's default comes as


def _unless_same(call: Call, op: Op, x: Node) -> Node:
    """`op` applied to x; x itself where that changes nothing, unless the caller would see that it is no new tensor."""
    return x if call.shape == x.shape and not call.returned else call.make(op, x)


def _reshape(call: Call) -> Normal:
    return _unless_same(call, Reshape(call.shape), squeezed(call.node("self"), call.shape))


def _expand(call: Call) -> Normal:
    return _unless_same(call, Expand(call.shape), call.node("self"))


def _permute(call: Call) -> Normal:
    x = call.node("self")
    return call.make(Permute(tuple(d % x.ndim for d in call["dims"])), x) if x.ndim else None


def _swapped(call: Call, a: int, b: int) -> Normal:
    x = call.node("self")
    if x.ndim < 2:
        return None
    order = list(range(x.ndim))
    a, b = a % x.ndim, b % x.ndim
    order[a], order[b] = order[b], order[a]
    return call.make(Permute(tuple(order)), x)


def _transpose(call: Call) -> Normal:
    names = ("dim0", "dim1") if "dim0" in call.values else ("axis0", "axis1")
    return _swapped(call, call[names[0]], call[names[1]])


def _last_two_swapped(call: Call) -> Normal:
    return _swapped(call, -2, -1)


def _reversed_dims(call: Call) -> Normal:
    x = call.node("self")
    return call.make(Permute(tuple(reversed(range(x.ndim)))), x) if x.ndim > 1 else None


def _contiguous(call: Call) -> Normal:
    """A copy into row-major memory; the trace leaves out those of what lies so already."""
    x = call.node("self")
    if call["memory_format"] not in _ROW_MAJOR or x.ndim == 0:
        return None
    if isinstance(x.op, Permute):
        return call.make(Permute(x.op.dims, copy=True), x.arg(0))
    return call.make(Permute(tuple(range(x.ndim)), copy=True), x)


def _clone(call: Call) -> Normal:
    """A copy that nobody writes to is its operand, but for the order in memory that it may ask for."""
    if call.escapes:
        return None
    return call.node("self") if call["memory_format"] in (None, torch.preserve_format) else _contiguous(call)


def _alias(call: Call) -> Normal:
    """What a slice of everything is traced as."""
    return None if call.escapes else call.node("self")


def _detach(call: Call) -> Normal:
    """The same tensor without a gradient; x where it has none, unless the caller would see that it is no new one."""
    x = call.node("self")
    real = x.dtype.is_floating_point or x.dtype.is_complex
    return call.make(Detach(), x) if call.returned or (real and not isinstance(x.op, Detach)) else x


def _movedim(call: Call) -> Normal:
    x = call.node("self")
    if x.ndim == 0:
        return None
    source = [d % x.ndim for d in call.ints("source", 1)]
    target = [d % x.ndim for d in call.ints("destination", 1)]
    moved = dict(zip(target, source, strict=True))
    rest = iter([d for d in range(x.ndim) if d not in source])
    return call.make(Permute(tuple(moved[d] if d in moved else next(rest) for d in range(x.ndim))), x)


def _part(call: Call, x: Node, dim: int, start: int, stop: Size, step: int = 1) -> Node:
    whole = start == 0 and stop == x.shape[dim] and step == 1 and not call.returned
    return x if whole else call.make(Slice(dim, start, stop, step), x)


def _slice(call: Call) -> Normal:
    x = call.node("self")
    dim, step = call["dim"] % max(x.ndim, 1), call["step"]
    length, begin, end = x.shape[dim], call["start"], call["end"]
    if isinstance(length, int) and all(v is None or isinstance(v, int) for v in (begin, end)):
        start, stop, _ = slice(begin, end, step).indices(length)
        return _part(call, x, dim, start, max(start, stop), step)
    return _slice_symbolic(call, x, dim, step)


def _slice_symbolic(call: Call, x: Node, dim: int, step: int) -> Normal:
    """A slice along the batch; that it lies inside shows in the length which the trace found."""
    start, end, length = call["start"] or 0, call["end"], x.shape[dim]
    if not isinstance(start, int) or start < 0 or step != 1:
        return None
    stop = length if end is None or (isinstance(end, int) and end >= 2**62) else end
    if isinstance(stop, int) and stop < 0:
        stop = length + stop
    return _part(call, x, dim, start, stop)


def _select(call: Call) -> Normal:
    x, index = call.node("self"), call["index"]
    dim = call["dim"] % max(x.ndim, 1)
    length = x.shape[dim]
    if isinstance(length, int) and isinstance(index, int):
        index %= length
    if not isinstance(index, int) or index < 0:
        return None
    return call.make(Reshape(call.shape), call.make(Slice(dim, index, index + 1), x))


def _windows(call: Call) -> Normal:
    x, length, step = call.node("self"), call["size"], call["step"]
    dim = call["dimension"] % max(x.ndim, 1)
    known = x.ndim > 0 and isinstance(x.shape[dim], int) and length > 0
    return call.make(Windows(dim, length, step), x) if known else None


def _unfold(call: Call) -> Normal:
    """The windows of images; of one alone likewise."""
    x = call.node("self")
    if not all(isinstance(n, int) for n in x.shape[-3:]):
        return None
    images = x if x.ndim == 4 else call.make(Reshape((1, *x.shape)), x)
    columns = call.make(Unfold(_grid(call)), images)
    return columns if x.ndim == 4 else call.make(Reshape(call.shape), columns)


def _fold(call: Call) -> Normal:
    """Images of columns; one alone likewise."""
    x = call.node("self")
    if not all(isinstance(n, int) for n in x.shape[-2:]):
        return None
    columns = x if x.ndim == 3 else call.make(Reshape((1, *x.shape)), x)
    images = call.make(Fold(_pair(call, "output_size"), _grid(call)), columns)
    return images if x.ndim == 3 else call.make(Reshape(call.shape), images)


def _grid(call: Call) -> Grid:
    return Grid(*(_pair(call, name) for name in ("kernel_size", "dilation", "padding", "stride")))


def _pair(call: Call, name: str) -> tuple[int, int]:
    first, second = call.ints(name, 2)
    return first, second


def _narrow(call: Call) -> Normal:
    x, start = call.node("self"), call["start"]
    dim = call["dim"] % max(x.ndim, 1)
    if not isinstance(start, int) or start < 0:
        return None
    return _part(call, x, dim, start, start + call["length"])


def _split(call: Call) -> Normal:
    """Consecutive pieces, as long as the trace found them."""
    x = call.node("self")
    dim = call["dim"] % max(x.ndim, 1)
    parts: list[Node] = []
    start = 0
    for piece in call.results:
        length = piece.shape[dim] if piece is not None else None
        if not isinstance(length, int):
            return None
        parts.append(call.make(Slice(dim, start, start + length), x))
        start += length
    return tuple(parts)


def _unbind(call: Call) -> Normal:
    x = call.node("self")
    dim = call["dim"] % max(x.ndim, 1)
    pieces = [call.make(Slice(dim, i, i + 1), x) for i in range(len(call.results))]
    return tuple(call.make(Reshape((*x.shape[:dim], *x.shape[dim + 1 :])), p) for p in pieces)


def _alike(parts: Sequence[Node]) -> bool:
    return len(parts) > 1 and len({(p.ndim, p.dtype) for p in parts}) == 1 and parts[0].ndim > 0


def _cat(call: Call) -> Normal:
    parts = [p for p in call["tensors"] if p.shape != (0,) or p.dtype != call.result.dtype]  # passed over beside others
    if len(parts) == 1 and parts[0].dtype == call.result.dtype and not call.escapes:  # a copy
        return parts[0]  # type: ignore[no-any-return]
    return call.make(Cat(call["dim"] % parts[0].ndim), *parts) if parts and _alike(parts) else None


def _stack(call: Call) -> Normal:
    parts = call["tensors"]
    if not _alike(parts):
        return None
    dim = call["dim"] % (parts[0].ndim + 1)
    shape = (*parts[0].shape[:dim], 1, *parts[0].shape[dim:])
    return call.make(Cat(dim), *(call.make(Reshape(shape), p) for p in parts))


def _pads(x: Node, amounts: Sequence[Any]) -> tuple[tuple[int, int, int], ...] | None:
    """(dimension, left, right) from PyTorch's list, which starts at the last dimension."""
    if not amounts or not all(isinstance(a, int) for a in amounts):
        return None
    pairs = zip(amounts[::2], amounts[1::2], strict=True)
    return tuple(sorted((x.ndim - 1 - i, left, right) for i, (left, right) in enumerate(pairs)))


def _cropped(call: Call, x: Node, pads: tuple[tuple[int, int, int], ...]) -> Node:
    """Without what negative paddings leave out."""
    for dim, left, right in pads:
        if min(left, right) < 0:
            x = call.make(Slice(dim, max(-left, 0), int(x.shape[dim]) + min(right, 0)), x)
    return x


def _pad(call: Call) -> Normal:
    x, mode = call.node("self"), call.get("mode", "constant")
    pads, value = _pads(x, call["pad"]), call["value"] or 0.0
    if pads is None or isinstance(value, complex):
        return None
    if any(min(left, right) < 0 for _, left, right in pads):
        more = any(max(left, right) > 0 for _, left, right in pads)
        if mode != "constant" or not more or any(not isinstance(x.shape[d], int) for d, _, _ in pads):
            return None
        x, pads = _cropped(call, x, pads), tuple((d, max(left, 0), max(right, 0)) for d, left, right in pads)
    if not any(left or right for _, left, right in pads) and not call.escapes:
        return x
    return call.make(Pad(pads, mode, float(value)), x)


def _roll(call: Call) -> Normal:
    x = call.node("self")
    shifts, dims = call.ints("shifts", 1), [d % max(x.ndim, 1) for d in call.ints("dims", 1)]
    together: dict[int, int] = {}
    for d, shift in zip(dims, shifts, strict=False):
        together[d] = together.get(d, 0) + shift
    whole = len(dims) == len(shifts) and all(isinstance(x.shape[d], int) and x.shape[d] for d in together)
    return call.make(Roll(tuple(sorted(together.items()))), x) if whole and dims else None


def _flip(call: Call) -> Normal:
    x = call.node("self")
    dims = call.dims("dims", x.ndim) if call["dims"] else ()
    return call.make(Flip(dims), x) if dims and all(isinstance(x.shape[d], int) for d in dims) else None


def _upsample(call: Call) -> Normal:
    """Nearest neighbours, where those that eager's float32 finds are those of whole numbers."""
    x = call.node("input")
    lengths = _lengths(call)
    if lengths is None or call.result.dtype.is_complex or not all(map(_is_found, x.shape[2:], lengths)):
        return None
    return call.make(Upsample(lengths), x)


def _interpolate(call: Call, kind: Literal["linear", "cubic"] = "linear") -> Normal:
    """Between neighbours."""
    lengths = _lengths(call)
    if lengths is None or not call.result.dtype.is_floating_point:
        return None
    return call.make(Interpolate(lengths, call["align_corners"], kind), call.node("input"))


def _lengths(call: Call) -> tuple[int, ...] | None:
    """The lengths that images are resized to, where the factors, if they are given, are what these come to."""
    pairs = list(zip(call.node("input").shape[2:], call.shape[2:], strict=True))
    if not pairs or not all(isinstance(n, int) and n for pair in pairs for n in pair):
        return None
    factors = call["scale_factors"] or ()
    exact = all(n * factor == m for (n, m), factor in zip(pairs, factors, strict=False))
    return tuple(m for _, m in pairs) if exact else None


def _is_found(n: int, length: int) -> bool:
    """Whether eager's float32 finds the nearest neighbours: 41 * (1 / 41) is less than 1 there."""
    i = torch.arange(length)
    return torch.equal((i.float() * (torch.tensor(float(n)) / length)).long(), i * n // length)


def _embedding(call: Call) -> Normal:
    """A weight that is renormalised on the way (`max_norm`) is written in place, so its lookup stays a call."""
    padding_idx = call["padding_idx"]
    if not isinstance(padding_idx, int) or padding_idx < -1:
        return None
    op = Embedding(padding_idx, call["scale_grad_by_freq"], call["sparse"])
    return call.make(op, call.node("weight"), call.node("indices"))


def _bags(call: Call) -> Normal:
    """Sums, or means, of as many rows for each index of a first dimension: ``F.embedding_bag`` of a matrix."""
    weight, indices, begins = (call.node(name) for name in ("weight", "indices", "offsets"))
    plain = call["mode"] in (0, 1) and call.get("padding_idx") is None and not call["include_last_offset"]
    if not plain or call.used - {0} or weight.dtype not in (torch.float32, torch.float64):
        return None
    size = _size_of_bags(begins)
    if size is None or indices.shape[0] != begins.shape[0] * size:
        return None
    bags = call.make(Reshape((begins.shape[0], size)), indices)
    rows = call.make(Embedding(-1, call["scale_grad_by_freq"], call["sparse"]), weight, bags)
    own = call.optional("per_sample_weights")
    if own is not None:
        rows = call.apply("mul", rows, call.make(Reshape((begins.shape[0], size, 1)), own))
    return call.make(Reduce("mean" if call["mode"] else "sum", (1,)), rows), None, None, None


def _size_of_bags(begins: Node) -> int | None:
    """Of bags that all have as many, one behind the other."""
    op = begins.op
    return op.step if isinstance(op, Positions) and op.start == 0 and op.modulo is None else None


def _index(call: Call) -> Normal:
    """Entries along the first dimension of a weight, or of what has a known shape, at the numbers of one tensor."""
    indices = call["indices"]
    return _entries(call, indices[0], wraps=True) if len(indices) == 1 else None


def _index_select(call: Call) -> Normal:
    return _entries(call, call.node("index"), wraps=False) if call["dim"] == 0 else None


def _entries(call: Call, indices: Node, *, wraps: bool) -> Normal:
    x = call.node("self")
    numbers = indices.dtype in (torch.int64, torch.int32) and indices.device == x.device
    if not (numbers and x.ndim and x.dtype.is_floating_point and all(isinstance(n, int) and n for n in x.shape)):
        return None
    rows = x if x.ndim == 2 else call.make(Reshape((x.shape[0], prod(x.shape[1:]))), x)
    found = call.make(Embedding(wraps=wraps), rows, indices)
    return found if x.ndim == 2 else call.make(Reshape(call.shape), found)


def _cast(call: Call) -> Normal:
    """A change of dtype alone; a tensor that has it already comes back itself, as in PyTorch."""
    x = call.node("self")
    formats = (None, torch.preserve_format)
    moved = call.result.device != x.device or call.get("layout") not in (None, torch.strided)
    if moved or call.get("copy") or call.get("memory_format") not in formats or call.get("pin_memory"):
        return None
    if call.result.dtype != x.dtype:
        return call.make(Cast(call.result.dtype), x)
    return None if call.escapes and call.target == "aten._to_copy.default" else x  # which is a copy


def _full(call: Call) -> Normal:
    """A tensor of one value; of what is empty, of any.

    One that lies as another tensor does is expanded from a number: functions of it lie as their other operands do.
    """
    name = call.target.split(".")[1].removeprefix("new_")
    value = {"zeros": 0, "ones": 1, "empty": 0, "zero": 0}.get(name.removesuffix("_like"))
    value = call.get("fill_value", call.get("s", call.get("value"))) if value is None else value
    plain = call.get("layout") in (None, torch.strided) and not call.get("pin_memory")
    plain = plain and call.get("memory_format") in (None, torch.preserve_format, torch.contiguous_format)
    if not plain or not isinstance(value, bool | int | float) or call.escapes:
        return None
    alike = name.endswith("_like") or name in ("fill", "zero")
    alike = alike and call.get("memory_format") != torch.contiguous_format and len(call.shape) > 0
    one = call.make(Full(() if alike else call.shape, value, call.result.dtype, call.result.device))
    return call.make(Expand(call.shape), one) if alike else one


def _positions(call: Call) -> Normal:
    """Whole numbers that are not negative and grow: where elements lie, mostly."""
    start, step = call.get("start", 0), call.get("step", 1)
    plain = call.get("layout") in (None, torch.strided) and not call.get("pin_memory") and not call.escapes
    if not plain or call.result.dtype not in (torch.int64, torch.int32):
        return None
    if not all(type(n) is int for n in (start, step)) or start < 0 or step < 1:
        return None
    return call.make(Positions(call.shape[0], start, step, None, call.result.dtype, call.result.device))


_RESHAPES = (
    *("view.default", "reshape.default", "_unsafe_view.default", "view_as.default", "reshape_as.default"),
    *("flatten.using_ints", "unflatten.int", "ravel.default"),
    *("squeeze.default", "squeeze.dim", "squeeze.dims", "unsqueeze.default"),
)
_FACTORIES = (
    *("zeros.default", "ones.default", "full.default", "new_zeros.default", "new_ones.default", "new_full.default"),
    *("zeros_like.default", "ones_like.default", "full_like.default", "empty_like.default", "scalar_tensor.default"),
    *("fill.Scalar", "zero.default"),
)

TABLE: dict[str, Handler] = {
    **{f"aten.{name}": _reshape for name in _RESHAPES},
    **{f"aten.{name}": _full for name in _FACTORIES},
    **{f"aten.{name}.default": _expand for name in ("expand", "expand_as", "broadcast_to")},
    **{f"aten.to.{name}": _cast for name in ("dtype", "dtype_layout", "device", "other")},
    "aten.type_as.default": _cast,
    "aten._to_copy.default": _cast,
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose,
    "aten.swapaxes.default": _transpose,
    "aten.swapdims.default": _transpose,
    "aten.t.default": _last_two_swapped,
    "aten.mT.default": _last_two_swapped,
    "aten.numpy_T.default": _reversed_dims,
    "aten.contiguous.default": _contiguous,
    "aten.clone.default": _clone,
    "aten.alias.default": _alias,
    "aten.detach.default": _detach,
    "aten.movedim.int": _movedim,
    "aten.movedim.intlist": _movedim,
    "aten.moveaxis.int": _movedim,
    "aten.moveaxis.intlist": _movedim,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.narrow.default": _narrow,
    "aten.split.Tensor": _split,
    "aten.split.sizes": _split,
    "aten.split_with_sizes.default": _split,
    "aten.chunk.default": _split,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.concat.default": _cat,
    "aten.concatenate.default": _cat,
    "aten.stack.default": _stack,
    "aten.roll.default": _roll,
    "aten.flip.default": _flip,
    "aten.unfold.default": _windows,
    "aten.im2col.default": _unfold,
    "aten.col2im.default": _fold,
    **{f"aten.upsample_nearest{n}d.vec": _upsample for n in (1, 2, 3)},
    **{f"aten.upsample_{kind}.vec": _interpolate for kind in ("linear1d", "bilinear2d", "trilinear3d")},
    **{f"aten.arange.{name}": _positions for name in ("default", "start", "start_step")},
    "aten.upsample_bicubic2d.vec": partial(_interpolate, kind="cubic"),
    "aten.embedding.default": _embedding,
    "aten.embedding_bag.padding_idx": _bags,
    "aten.index.Tensor": _index,
    "aten.index_select.default": _index_select,
    "aten.pad.default": _pad,
    "aten.constant_pad_nd.default": _pad,
}
