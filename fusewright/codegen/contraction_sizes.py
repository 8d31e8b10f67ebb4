"""The lengths of a contraction's output and of its cells, as expressions over the input's."""

from __future__ import annotations

from fusewright.schedule.contraction import Contraction


def lengths(c: Contraction) -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Per dimension d, h, w: the input's length, the convolution's output length, the number of cells."""
    axes = "dhw"[3 - (c.x.ndim - 2) :]
    into = {a: f"in_{a}" if a in axes else "1" for a in "dhw"}
    out = {a: _length(c, i, into[a]) for i, a in enumerate("dhw")}
    return into, out, {a: _cells(c, i, out[a]) for i, a in enumerate("dhw")}


def _length(c: Contraction, i: int, length: str) -> str:
    """The convolution's output length along one of the three dimensions."""
    op = c.op
    k = i - (3 - len(op.stride))
    if k < 0:
        return "1"
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
    """The number of cells along one of the three dimensions."""
    axis, window = c.axes[i], c.window
    k = i - (3 - len(c.op.stride))
    if window is None or k < 0:
        return f"ceil_div({out}, {axis.stride})" if axis.stride > 1 else out
    if window.op.ceil_mode:
        return str(window.node.shape[2 + k])  # static: ceil_mode refuses symbolic lengths
    return f"(({out} + {2 * window.op.padding[k] - window.op.kernel[k]}) // {window.op.stride[k]} + 1)"
