"""Range sums in ATen.

How far the result's dtype is carried: sums of half precisions accumulate in it throughout.  A float64 sum of float32
reads at a thirteenth of the speed on a CPU and a fifth on an H200; so there the first dimension (the innermost one
there is) is summed in float32 by PyTorch's cascade, short rows at a time, and everything after that in float64.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fusewright.ir.build import identity_slots
from fusewright.ir.node import Node
from fusewright.ir.ops import RangeSum, Slot
from fusewright.ir.slots import make_slot, sliding

Slots = tuple[Slot, ...]

# Irregular slots up to this many are summed one by one; more of them are gathered first.
FEW = 16
GATHERED = 8192

# Windows of up to this many elements are left to average pooling, which adds them one after another.
POOLED = 64


@dataclass(frozen=True)
class _Stage:
    """One step of a range sum: helper statements, the expression, and the scale still to be applied."""

    before: tuple[str, ...]
    text: str
    scale: float


def lines(op: RangeSum, x: Node, operand: str, name: str) -> list[str]:
    """Statements that leave the range sum of `operand` in the variable `name`."""
    pooled = _adaptive(op, x, operand) or _pooled(op, x, operand)
    if pooled is not None:
        return [f"{name} = {pooled}"]
    result: list[str] = []
    value, dtype, factor = operand, x.dtype, 1.0
    stages = _stages(op, x)
    for i, dims in enumerate(stages):
        cast = ""
        if dtype != op.dtype and (i > 0 or _half(x)):
            cast, dtype = f", dtype={op.dtype}", op.dtype
        stage = _total(dims, x, value, cast) if len(dims) > 1 else _along(*dims[0], x, value, cast, name)
        late = dtype != op.dtype and i == len(stages) - 1
        result += [*stage.before, f"{name} = {stage.text}" + (f".to({op.dtype})" if late else "")]
        if stage.before:
            result.append(f"del {', '.join(line.partition(' = ')[0] for line in stage.before)}")
        value, factor = name, factor * stage.scale
    if factor != 1.0:
        result.append(f"{name} = {name} * {factor!r}")
    return result


def _half(x: Node) -> bool:
    return x.dtype.itemsize < 4


def _stages(op: RangeSum, x: Node) -> list[list[tuple[int, Slots]]]:
    """The dimensions in the order they are summed; single sums that can share a stage do.

    Innermost first, as rows are what is fast to sum; but a GPU reads part of each row slowly, so there the innermost
    dimension comes last when it is not summed whole.
    """
    stages: list[list[tuple[int, Slots]]] = []
    inner, slots = op.table[-1]
    ragged = x.device.type != "cpu" and (len(slots) > 1 or slots[0] != Slot(0, x.shape[inner], 1, slots[0].scale))
    for dim, slots in op.table if ragged else reversed(op.table):
        narrow_first = not _half(x) and x.dtype != op.dtype and len(stages) == 1
        shared = stages and not narrow_first and all(len(s) == 1 and s[0].count for _, s in [*stages[-1], (dim, slots)])
        if shared:
            stages[-1].append((dim, slots))
        else:
            stages.append([(dim, slots)])
    return stages


def _total(dims: list[tuple[int, Slots]], x: Node, value: str, cast: str) -> _Stage:
    """One slot along each of several dimensions: a slice and a sum."""
    scale = 1.0
    for _, (slot,) in dims:
        scale *= slot.scale
    listed = ", ".join(str(d) for d, _ in sorted(dims))
    text = f"{_cut(value, {d: s for d, (s,) in dims}, x)}.sum(({listed}), keepdim=True{cast})"
    return _Stage((), text, scale)


def _along(dim: int, slots: Slots, x: Node, value: str, cast: str, name: str) -> _Stage:
    """All slots along one dimension."""
    if len(slots) == 1 and slots[0].count:
        text = f"{_cut(value, {dim: slots[0]}, x)}.sum({dim}, keepdim=True{cast})"
        return _Stage((), text, slots[0].scale)
    if slots == identity_slots(x.shape[dim])[::-1]:
        return _Stage((), f"{value}.flip({dim})" + (f".to({cast.removeprefix(', dtype=')})" if cast else ""), 1.0)
    windows = _windows(value, dim, slots, cast, x, name)
    before: tuple[str, ...] = ()
    if windows is not None:
        before, text = windows
    elif len(slots) > FEW and len(slots) * max(s.count for s in slots) <= GATHERED:
        text = _gathered(value, dim, slots, cast, x)
    else:
        before, text = _pieces(value, dim, slots, cast, name)
    scales = {s.scale for s in slots if s.count}
    if len(scales) == 1:
        return _Stage(before, text, scales.pop())
    dtype = cast.removeprefix(", dtype=") or f"{value}.dtype"
    shape = ", ".join(["-1", *["1"] * (x.ndim - dim - 1)])
    vector = f"torch.tensor({[s.scale for s in slots]}, dtype={dtype}, device={value}.device).view({shape})"
    return _Stage(before, f"({text} * {vector})", 1.0)


def _cut(value: str, cuts: dict[int, Slot], x: Node) -> str:
    """`value` restricted to one slot per dimension."""
    index = [":"] * (max(cuts) + 1)
    for dim, s in cuts.items():
        if (s.start, s.stop, s.step) != (0, x.shape[dim], 1):
            index[dim] = _index(s.start, s.stop, s.step)
    return value if set(index) == {":"} else f"{value}[{', '.join(index)}]"


def _index(start: int, stop: int, step: int) -> str:
    return f"{start}:{stop}" + (f":{step}" if step != 1 else "")


@dataclass(frozen=True)
class _Windows:
    """`slots` windows of `count` elements every `step`, `distance` apart; the first one starts at `first`."""

    first: int
    count: int
    step: int
    distance: int
    slots: int

    @property
    def span(self) -> int:
        return (self.count - 1) * self.step + 1

    @property
    def stop(self) -> int:
        return self.first + (self.slots - 1) * self.distance + self.span


def _windows(value: str, dim: int, slots: Slots, cast: str, x: Node, name: str) -> tuple[tuple[str, ...], str] | None:
    """Slots that are sliding windows, or an interleaving of a few such families: one unfold and sum per family.

    Windows that reach over an end read zeros there; where there are few, they had better share what they sum, like
    those of every second element or fewer: a kernel's taps under a whole sum are such windows.
    """
    length = x.shape[dim]
    assert isinstance(length, int)
    for period in range(1, min(len(slots) // 2, 32) + 1):
        families = [] if len(slots) % period else [_sliding(slots[i::period], length) for i in range(period)]
        found = [f for f in families if f is not None]
        if not found or len(found) < period:
            continue
        left = max(0, *(-f.first for f in found))
        right = max(0, *(f.stop - length for f in found))
        before: tuple[str, ...] = ()
        if len(slots) <= FEW and (left or right or any(f.step > 1 for f in found)):
            continue
        if left or right:
            ends = ", ".join([*["0"] * 2 * (x.ndim - dim - 1), str(left), str(right)])
            before, value = (f"{name}_padded = F.pad({value}, ({ends}))",), f"{name}_padded"
        parts = [_family(value, dim, replace(f, first=f.first + left), cast) for f in found]
        joined = f"torch.stack(({', '.join(parts)}), {dim + 1}).flatten({dim}, {dim + 1})"
        return before, joined if period > 1 else parts[0]
    return None


def _sliding(slots: Slots, length: int) -> _Windows | None:
    """Ranges of one length and step at a constant positive distance, less what of them lies outside of the tensor."""
    count = max(s.count for s in slots)
    at = next(i for i, s in enumerate(slots) if s.count == count)
    step = slots[at].step
    behind = at + 1 < len(slots) and slots[at + 1].count > 0
    distance = slots[at + 1].start - slots[at].start if behind else slots[at].stop - slots[at - 1].stop
    found = _Windows(slots[at].start - at * distance, count, step, distance, len(slots))
    ranges = [make_slot(found.first + i * distance, step, count, length, s.scale) for i, s in enumerate(slots)]
    return found if count and distance > 0 and ranges == [*slots] else None


def _family(value: str, dim: int, f: _Windows, cast: str) -> str:
    lead = f"{':, ' * dim}{_index(f.first, f.stop, 1)}"
    if f.count == 1:
        dtype = cast.removeprefix(", dtype=")
        if f.distance == 1 or dtype:
            step = f":{f.distance}" if f.distance > 1 else ""
            return f"{value}[{lead}{step}]" + (f".to({dtype})" if dtype else "")
        return f"{value}[{lead}:{f.distance}].contiguous()"  # what comes out is a value of its own, in order
    taken = f"[..., ::{f.step}]" if f.step > 1 else ""
    return f"{value}[{lead}].unfold({dim}, {f.span}, {f.distance}){taken}.sum(-1{cast})"


def _gathered(value: str, dim: int, slots: Slots, cast: str, x: Node) -> str:
    """Many irregular slots: their indices, filled up with that of an appended zero, gathered and summed."""
    width, length = max(1, *(s.count for s in slots)), x.shape[dim]
    rows = [[*range(s.start, s.stop, s.step)] if s.count else [] for s in slots]
    index = [i for row in rows for i in [*row, *[length] * (width - len(row))]]
    zero = f"{value}.new_zeros({value}[{':, ' * dim}:1].shape)"
    padded = f"torch.cat(({value}, {zero}), {dim})"
    picked = f"{padded}.index_select({dim}, torch.tensor({index}, device={value}.device))"
    return f"{picked}.unflatten({dim}, ({len(slots)}, {width})).sum({dim + 1}{cast})"


def _pieces(value: str, dim: int, slots: Slots, cast: str, name: str) -> tuple[tuple[str, ...], str]:
    """One sum per slot; slots on one residue share the sum of their common core and only add their own ends to it."""
    lead, dtype = ":, " * dim, cast.removeprefix(", dtype=")
    cores = _cores(slots)
    names = {key: f"{name}_core_{i}" if i else f"{name}_core" for i, key in enumerate(cores)}

    def part(start: int, stop: int, step: int, wide: bool = True) -> str:
        if stop - start <= step:
            return f"{value}[{lead}{start}:{start + 1}]" + (f".to({dtype})" if dtype and wide else "")
        return f"{value}[{lead}{_index(start, stop, step)}].sum({dim}, keepdim=True{cast})"

    def whole(s: Slot) -> str:
        key = (s.step, s.start % s.step)
        if s.count == 0:
            return f"torch.zeros_like({value}[{lead}:1]{cast})"
        if key not in cores:
            return part(s.start, s.stop, s.step)
        start, stop = cores[key]
        ends = [part(a, b, s.step, wide=False) for a, b in ((s.start, start), (stop, s.stop)) if a < b]
        return " + ".join([names[key], *ends])

    before = {names[key]: part(a, b, key[0]) for key, (a, b) in cores.items()}
    texts = [whole(s) for s in slots]
    for text in dict.fromkeys(t for t in texts if " + " in t and texts.count(t) > 1):
        before[f"{name}_slot_{texts.index(text)}"] = text
    known = {text: variable for variable, text in before.items()}
    joined = ", ".join(known.get(t, t) for t in texts)
    statements = tuple(f"{variable} = {text}" for variable, text in before.items())
    return statements, joined if len(texts) == 1 else f"torch.cat(({joined}), {dim})"


def _cores(slots: Slots) -> dict[tuple[int, int], tuple[int, int]]:
    """Per (step, residue) with several slots, the indices that all of them share, when there are any."""
    groups: dict[tuple[int, int], list[Slot]] = {}
    for s in slots:
        if s.count:
            groups.setdefault((s.step, s.start % s.step), []).append(s)
    shared = {
        key: (max(s.start for s in members), min(s.start + s.count * s.step for s in members))
        for key, members in groups.items()
        if len(members) > 1
    }
    return {key: (start, stop) for key, (start, stop) in shared.items() if start < stop}


def adaptive_slots(length: int, out: int) -> Slots:
    """The ranges of adaptive average pooling: slot i averages floor(i*N/out) up to ceil((i+1)*N/out)."""
    bounds = [(i * length // out, -(-(i + 1) * length // out)) for i in range(out)]
    return tuple(Slot(a, b, 1, 1.0 / (b - a)) for a, b in bounds)


def _trailing(op: RangeSum, x: Node) -> int:
    """How many dimensions are summed where they are all those after (N, C) and stay in the operand's dtype; else 0."""
    dims = [dim for dim, _ in op.table]
    plain = op.dtype == x.dtype and 3 <= x.ndim <= 5 and dims == list(range(2, x.ndim))
    return len(dims) if plain else 0


def _adaptive(op: RangeSum, x: Node, operand: str) -> str | None:
    """Adaptive average pooling, where that is what the table says."""
    if not _trailing(op, x):
        return None
    for dim, slots in op.table:
        length = x.shape[dim]
        if not isinstance(length, int) or length == 0 or slots != adaptive_slots(length, len(slots)):
            return None
    return f"F.adaptive_avg_pool{_trailing(op, x)}d({operand}, {tuple(len(slots) for _, slots in op.table)})"


def _pooled(op: RangeSum, x: Node, operand: str) -> str | None:
    """Average pooling on a GPU, where its kernel is faster than a sum over a sliding view, for small whole windows."""
    n = _trailing(op, x)
    slides = [(sliding(slots), slots) for _, slots in op.table]
    if not n or x.device.type == "cpu" or any(len(slots) < 2 or not s or s[0] != 1 for s, slots in slides):
        return None
    kernel = tuple(slots[0].count for _, slots in op.table)
    if prod(kernel) > POOLED:
        return None
    stride = tuple(slots[1].start - slots[0].start for _, slots in op.table)
    cut = {dim: Slot(slots[0].start, slots[-1].stop, 1, 1.0) for dim, slots in op.table}
    factor = prod(slots[0].scale * slots[0].count for _, slots in op.table)
    text = f"F.avg_pool{n}d({_cut(operand, cut, x)}, {kernel}, {stride})"
    return text if abs(factor - 1.0) < 1e-12 else f"{text} * {factor!r}"
