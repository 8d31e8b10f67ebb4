"""ATen's spellings -> semantic operations: one explicit table from overload name to a small function.

A function returns the node (or one per result), or `None` for a call it does not understand; then the call stays opaque
and runs as it did.  Whatever a function returns is believed only if its type is the one that the trace found.
"""

from fusewright.capture.normalize import composites, conv, einsum, functions, norms, pooling, reductions, shapes
from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.errors import GraphError
from fusewright.ir.node import Node

__all__ = ["TABLE", "Call", "Handler", "Normal", "normalize"]

TABLE: dict[str, Handler] = {
    **conv.TABLE,
    **pooling.TABLE,
    **shapes.TABLE,
    **reductions.TABLE,
    **norms.TABLE,
    **functions.TABLE,
    **composites.TABLE,
    **einsum.TABLE,
}


def normalize(call: Call) -> Normal:
    """The semantic form of `call`, or `None` where there is none."""
    handler = TABLE.get(call.target)
    if handler is None or _unusual(call):
        return None
    try:
        found = handler(call)
    except (GraphError, NotImplementedError, RuntimeError):  # the last two: a dtype the function does not take
        return None
    nodes = found if isinstance(found, tuple) else (found,)
    if found is None or len(nodes) != len(call.results):
        return None
    agree = all(n is None or n.type[:3] == t[:3] for n, t in zip(nodes, call.results, strict=True) if t is not None)
    return found if agree else None


def _unusual(call: Call) -> bool:
    """Complex and quantised values are left to PyTorch."""
    nodes = [v for v in call.values.values() if isinstance(v, Node)]
    types = [*(n.type for n in nodes), *(r for r in call.results if r is not None)]
    return any(t.dtype.is_complex or str(t.dtype).startswith("torch.q") for t in types)
