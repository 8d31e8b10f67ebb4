"""`torch.einsum` of one or two operands, as sums, a product of elements, or a matrix product.

    einsum("bhid,bhjd->bhij", q, k)  ->  q @ k.permute(0, 1, 3, 2)
    einsum("bijl,lk->bijk", x, w)    ->  x @ w

A letter is one of four things: a *batch* letter, of both operands and the result; *summed*, of both and not the result;
or of the result and the *left* or the *right* operand alone.  What only one operand has is summed first.  PyTorch lays
results out in the order batch, left, right, each by the result's own order, with operands exchanged where all of the
right letters come before the left ones, and looks at that in another order; so do these.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from math import prod

import sympy

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.build import permute, reshape, total
from fusewright.ir.node import Node
from fusewright.ir.ops import Matmul, Size, size


def _terms(equation: str, operands: Sequence[Node]) -> tuple[list[str], str] | None:
    """The letters of the operands and of the result; an ellipsis is as many letters as it stands for."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    if len(terms) != len(operands):
        return None
    hidden = [x.ndim - len(t.replace("...", "")) if "..." in t else 0 for t, x in zip(terms, operands, strict=True)]
    spare = [letter for letter in string.ascii_letters if letter not in equation]
    if min(hidden) < 0 or max(hidden) > len(spare):
        return None
    every = "".join(spare[: max(hidden)])
    terms = [t.replace("...", every[len(every) - n :]) for t, n in zip(terms, hidden, strict=True)]
    if not arrow:
        once = "".join(terms)
        result = "..." + "".join(sorted(c for c in set(once) - set(every) if once.count(c) == 1))
    result = result.replace("...", every)
    plain = all(t.isalpha() and len(set(t)) == len(t) for t in (*terms, result or "x"))  # no diagonals
    alike = all(len(t) == x.ndim for t, x in zip(terms, operands, strict=True))
    return (terms, result) if plain and alike and set(result) <= set("".join(terms)) else None


def _einsum(call: Call) -> Normal:
    operands = call["tensors"]
    found = _terms(call["equation"], operands) if len(operands) <= 2 else None
    if found is None or not all(x.dtype.is_floating_point for x in operands):
        return None
    terms, result = found
    lengths: dict[str, Size] = {}
    for term, x in zip(terms, operands, strict=True):
        if any(lengths.setdefault(letter, n) != n for letter, n in zip(term, x.shape, strict=True)):
            return None  # one that is repeated
    parts = []
    for i, (term, x) in enumerate(zip(terms, operands, strict=True)):
        others = {*result, *"".join(terms[:i] + terms[i + 1 :])}
        away = [c for c in term if c not in others]
        if away:  # in the order of the result, as PyTorch does
            kept = sorted((c for c in term if c in others), key=(result + term).index)
            x = total(_ordered(x, term, (*kept, *away)), range(len(kept), len(term)))
            term = "".join(kept)
        parts.append((term, x))
    if len(parts) == 1:
        ((term, x),) = parts
        return _ordered(x, term, result)
    return _pair(call, parts[0], parts[1], result, lengths)


def _pair(call: Call, one: tuple[str, Node], other: tuple[str, Node], result: str, lengths: Mapping[str, Size]) -> Node:
    (a, x), (b, y) = one, other
    batch = [c for c in result if c in a and c in b]
    left, right = ([c for c in result if c in own and c not in batch] for own in (a, b))
    if left and right and result.index(right[-1]) < result.index(left[0]):
        return _pair(call, other, one, result, lengths)
    summed = [c for c in a if c in b and c not in result]
    if not summed:
        return call.apply("mul", _spread(x, a, result), _spread(y, b, result))

    def merged(letters: Sequence[str]) -> list[Size]:
        return [size(sympy.expand(prod(lengths[c] for c in letters)))]

    own, shape = [lengths[c] for c in batch], [lengths[c] for c in (*batch, *left, *right)]
    rows = merged(left) if batch or not left else [lengths[c] for c in left]
    x = reshape(_ordered(x, a, (*batch, *left, *summed)), (*own, *rows, *merged(summed)))
    y = _ordered(y, b, (*batch, *summed, *right))
    y = reshape(y, (*own, *merged(summed), *merged(right)))
    product = reshape(call.make(Matmul(), x, y, None), shape)
    return _ordered(product, "".join((*batch, *left, *right)), result)


def _ordered(x: Node, term: str, wanted: Sequence[str]) -> Node:
    """x with its dimensions in another order."""
    return permute(x, [term.index(c) for c in wanted])


def _spread(x: Node, term: str, result: str) -> Node:
    """x with a dimension of size 1 for every letter that it does not have."""
    x = _ordered(x, term, [c for c in result if c in term])
    lengths = iter(x.shape)
    return reshape(x, [next(lengths) if c in term else 1 for c in result])


TABLE: dict[str, Handler] = {"aten.einsum.default": _einsum}
