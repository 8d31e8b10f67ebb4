"""The lengths of a contraction's output and of its cells, as expressions over the input's."""

from __future__ import annotations

from fusewright.schedule.contraction import Contraction


def names(c: Contraction) -> list[str]:
    """Of the input's lengths along its dimensions of positions."""
    return [f"in_{a}" for a in "dhw"[3 - (c.x.ndim - 2) :]]


def sizes(c: Contraction) -> tuple[tuple[str, int, int], ...]:
    """Those of a call (`fusewright.kernel.Kernel.sizes`): samples, and the input's lengths."""
    return ("N", 0, 0), *((name, 0, 2 + i) for i, name in enumerate(names(c)))


def lengths(c: Contraction) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Per axis d, h, w: the input's length, the convolution's output length, the number of cells."""
    each = [_along(c, i) for i in range(3)]
    into, out, cells = (dict(zip("dhw", found, strict=True)) for found in zip(*each, strict=True))
    return into, out, cells


def written(c: Contraction) -> list[str]:
    """Lengths of what is written at all positions, along each of their dimensions."""
    along = [_along(c, i)[1 if c.window is None else 2] for i in range(3)]
    own = names(c)
    found = ([n] if len(dims) == 1 else [own[k] for k in dims] for n, dims in zip(along, c.dims, strict=True))
    return [n for several in found for n in several]


def _along(c: Contraction, i: int) -> tuple[str, str, str]:
    """Those of axis `i`: dimensions that are counted as one are as long behind the convolution as in front of it."""
    own = names(c)
    dims = [own[k] for k in c.dims[i]]
    if len(dims) != 1:
        length = f"({' * '.join(dims)})" if dims else "1"
        return length, length, length
    out = _length(c, i, *dims)
    return dims[0], out, _cells(c, i, out)


def _length(c: Contraction, i: int, length: str) -> str:
    """The convolution's output length along one axis."""
    op, (k,) = c.op, c.dims[i]
    reach, pad = op.dilation[k] * (c.axes[i].taps - 1), sum(op.padding[k])
    if op.transposed:
        return f"(({length} - 1) * {op.stride[k]} + {reach + (op.output_padding or (0,) * 3)[k] + 1 - pad})"
    if c.box is not None:
        if c.conv.shape[2 + k] == 1:
            return "1"  # there may be place for more windows than the one that is wanted
        reached = (c.box.count[i] - 1) * c.box.step[i] - c.box.before[i] - c.box.behind[i]
        if c.box.stride[i] > 1:  # so many windows lie there
            length, reached = f"(({length} - {reached + 1}) // {c.box.stride[i]} + 1)", 0
        reach += reached
    return f"(({length} + {pad - reach - 1}) // {op.stride[k]} + 1)"


def _cells(c: Contraction, i: int, out: str) -> str:
    """The number of cells along one axis."""
    axis, window, (k,) = c.axes[i], c.window, c.dims[i]
    if window is None:
        return f"ceil_div({out}, {axis.stride})" if axis.stride > 1 else out
    if window.op.ceil_mode:
        return str(window.node.shape[2 + k])  # static: ceil_mode refuses symbolic lengths
    size, apart, padding = c.pooling(i)
    return f"(({out} + {2 * padding - size}) // {apart} + 1)"
