"""Unrolled loops in CUDA C++."""

from __future__ import annotations

from collections.abc import Sequence

from fusewright.codegen.text import Lines, block, indent

UNROLL = "#pragma unroll"


def nest(heads: Sequence[str], body: Lines) -> Lines:
    """`body` in nested unrolled loops."""
    if not heads:
        return body
    if len(heads) > 1:
        return [UNROLL, heads[0], *indent(nest(heads[1:], body))]
    return [UNROLL, *(block(heads[0], body) if len(body) > 1 else [heads[0], *indent(body)])]
