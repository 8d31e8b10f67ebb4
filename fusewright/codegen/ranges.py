"""Range sums in ATen.

How far the result's dtype is carried: on a GPU every sum accumulates in it.  On a CPU, where a float64 sum of float32
reads at a thirteenth of the speed, the first dimension (the innermost one there is) is summed in the input's dtype by
PyTorch's cascade, short rows at a time, and everything after that in the result's.
"""

from __future__ import annotations

from fusewright.ir.node import Node
from fusewright.ir.ops import RangeSum, Slot

Slots = tuple[Slot, ...]


def lines(op: RangeSum, x: Node, operand: str, name: str) -> list[str]:
    """Statements that leave the range sum of `operand` in the variable `name`."""
    pooled = _adaptive(op, x)
    if pooled is not None:
        return [f"{name} = F.adaptive_avg_pool{len(pooled)}d({operand}, {pooled})"]
    result: list[str] = []
    value, dtype = operand, x.dtype
    promote = x.device.type != "cpu"
    factor = 1.0
    for group in _stages(op, x):
        cast = f", dtype={op.dtype}" if promote and dtype != op.dtype else ""
        if cast:
            dtype = op.dtype
        text, rest = _stage(group, x, value, cast)
        factor *= rest
        if dtype != op.dtype:
            text, dtype = f"{text}.to({op.dtype})", op.dtype
        result.append(f"{name} = {text}")
        value = name
    if factor != 1.0:
        result.append(f"{name} = {name} * {factor!r}")
    return result


def _stages(op: RangeSum, x: Node) -> list[list[tuple[int, Slots]]]:
    """The dimensions in the order they are summed, innermost first; plain total sums that can share a stage do."""
    stages: list[list[tuple[int, Slots]]] = []
    for dim, slots in reversed(op.table):
        whole = len(slots) == 1 and slots[0].count > 0
        alone = x.device.type == "cpu" and x.dtype != op.dtype and len(stages) == 1
        if whole and stages and not alone and all(len(s) == 1 and s[0].count > 0 for _, s in stages[-1]):
            stages[-1].append((dim, slots))
        else:
            stages.append([(dim, slots)])
    return stages


def _stage(group: list[tuple[int, Slots]], x: Node, value: str, cast: str) -> tuple[str, float]:
    """The text of one stage without its common scale, and that scale."""
    if len(group) > 1 or len(group[0][1]) == 1:
        cuts = {dim: slots[0] for dim, slots in group}
        scale = 1.0
        for slot in cuts.values():
            scale *= slot.scale
        dims = ", ".join(str(d) for d in sorted(cuts))
        return f"{_cut(value, cuts, x)}.sum(({dims},), keepdim=True{cast})", scale
    dim, slots = group[0]
    scales = {s.scale for s in slots if s.count}
    common = scales.pop() if len(scales) == 1 else None
    text = _windows(value, dim, slots, cast) or _pieces(value, dim, slots, cast, x)
    if common is not None:
        return text, common
    shape = ", ".join(["-1", *["1"] * (x.ndim - dim - 1)])
    scale_text = f"torch.tensor({[s.scale for s in slots]}, dtype={{dtype}}, device={value}.device).view({shape})"
    dtype = cast.removeprefix(", dtype=") or f"{value}.dtype"
    return f"({text} * {scale_text.format(dtype=dtype)})", 1.0


def _cut(value: str, cuts: dict[int, Slot], x: Node) -> str:
    """`value` restricted to one slot per dimension."""
    if all(s.start == 0 and s.stop == x.shape[d] and s.step == 1 for d, s in cuts.items()):
        return value
    index = [":"] * (max(cuts) + 1)
    for dim, s in cuts.items():
        index[dim] = _index(s.start, s.stop, s.step)
    return f"{value}[{', '.join(index)}]"


def _index(start: int, stop: int, step: int) -> str:
    return f"{start}:{stop}" + (f":{step}" if step != 1 else "")


def _windows(value: str, dim: int, slots: Slots, cast: str) -> str | None:
    """Slots that are sliding windows, or an interleaving of a few such families: one unfold and sum per family."""
    for period in range(1, min(len(slots) // 2, 32) + 1):
        if len(slots) % period:
            continue
        families = [slots[i::period] for i in range(period)]
        if not all(_sliding(f) for f in families):
            continue
        parts = [_family(value, dim, f, cast) for f in families]
        if period == 1:
            return parts[0]
        return f"torch.stack(({', '.join(parts)}), {dim + 1}).flatten({dim}, {dim + 1})"
    return None


def _sliding(slots: Slots) -> bool:
    """Equal, dense, non-empty ranges at a constant positive distance."""
    first = slots[0]
    distance = slots[1].start - first.start
    return (
        first.step == 1
        and first.count > 0
        and distance > 0
        and all(s.step == 1 and s.count == first.count and s.scale == first.scale for s in slots)
        and all(b.start - a.start == distance for a, b in zip(slots, slots[1:], strict=False))
    )


def _family(value: str, dim: int, slots: Slots, cast: str) -> str:
    first, distance = slots[0], slots[1].start - slots[0].start
    lead = f"{':, ' * dim}{_index(first.start, slots[-1].stop, 1)}"
    return f"{value}[{lead}].unfold({dim}, {first.count}, {distance}).sum(-1{cast})"


def _pieces(value: str, dim: int, slots: Slots, cast: str, x: Node) -> str:
    """One sum per slot; slots on the same residue share the sum of their common core, and only add their own ends to it."""
    lead = ":, " * dim
    cores = _cores(slots)
    shared = {key: core for key, core in cores.items() if core is not None}
    names = {key: f"core_{i}" for i, key in enumerate(shared)}

    def part(start: int, stop: int, step: int) -> str:
        return f"{value}[{lead}{_index(start, stop, step)}].sum({dim}, keepdim=True{cast})"

    texts: list[str] = []
    for s in slots:
        key = (s.step, s.start % s.step)
        core = cores.get(key) if s.count else None
        if s.count == 0:
            dtype = cast or f", dtype={value}.dtype"
            texts.append(f"torch.zeros_like({value}[{lead}:1]{dtype})")
        elif core is None:
            texts.append(part(s.start, s.stop, s.step))
        else:
            ends = [(s.start, core[0]), (core[1], s.stop)]
            texts.append(" + ".join([names[key], *(part(a, b, s.step) for a, b in ends if a < b)]))
    joined = f"torch.cat(({', '.join(texts)},), {dim})"
    if not names:
        return joined
    bound = ", ".join(names.values())
    values = ", ".join(part(core[0], core[1], key[0]) for key, core in shared.items())
    return f"(lambda {bound}: {joined})({values})"


def _cores(slots: Slots) -> dict[tuple[int, int], tuple[int, int] | None]:
    """Per (step, residue), the indices that all its slots share, when there are at least two slots and a shared index."""
    groups: dict[tuple[int, int], list[Slot]] = {}
    for s in slots:
        if s.count:
            groups.setdefault((s.step, s.start % s.step), []).append(s)
    cores: dict[tuple[int, int], tuple[int, int] | None] = {}
    for key, members in groups.items():
        start = max(s.start for s in members)
        stop = min(s.start + s.count * s.step for s in members)
        cores[key] = (start, stop) if len(members) > 1 and start < stop else None
    return cores


def adaptive_slots(length: int, out: int) -> Slots:
    """The ranges of adaptive average pooling: slot i averages floor(i*N/out) up to ceil((i+1)*N/out)."""
    bounds = [(i * length // out, -(-(i + 1) * length // out)) for i in range(out)]
    return tuple(Slot(a, b, 1, 1.0 / (b - a)) for a, b in bounds)


def _adaptive(op: RangeSum, x: Node) -> tuple[int, ...] | None:
    """The output size when the table is an adaptive average pooling over the trailing dimensions of (N, C, *)."""
    dims = [dim for dim, _ in op.table]
    n = len(dims)
    if op.dtype != x.dtype or not 1 <= n <= 3 or x.ndim != n + 2 or dims != list(range(2, x.ndim)):
        return None
    for dim, slots in op.table:
        length = x.shape[dim]
        if not isinstance(length, int) or length == 0 or slots != adaptive_slots(length, len(slots)):
            return None
    return tuple(len(slots) for _, slots in op.table)
