"""Products: a matmul with a reduction behind it, as a 1x1 convolution of views.

    reduce(f(x @ w))    is    reduce(f(conv(x', w')))

x (..., K) is read as x' (N, K, 1, M), channels last, whose positions are the rows of x, and w as w' with one tap:
nothing moves in memory.  Where tokens are reduced, the leading dimension is the samples, else all rows are of one.

    reduce(f(x.mT @ w))

x (N, K, M) is read as (N, K, 1, M), channels first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from fusewright.ir import ops
from fusewright.ir.build import permute, reshape
from fusewright.ir.node import Graph, Node, make, remade, topological
from fusewright.schedule import contraction, sample
from fusewright.schedule.chain import Chain, Fold, Map, Users, leaves, parse, varies
from fusewright.schedule.contraction import Contraction

# Elements of a weight up to which one block may as well multiply a sample after the other (`sample`).
SMALL = 16384


@dataclass(frozen=True)
class Product:
    """A group: matmul -> pointwise -> reduction over features, tokens or both.

    contraction   the same over views, channels last
    tensors       what a call passes, in the order of the views that `contraction.tensors` has of them
    by_sample     whether x's leading dimension is the samples; else there is one sample
    turned        whether x lies as (N, K, M)
    """

    root: Node
    contraction: Contraction
    tensors: tuple[Node, ...]
    by_sample: bool
    turned: bool = False

    @property
    def x(self) -> Node:
        return self.tensors[0]


def contraction_of(record: Contraction | Product) -> Contraction:
    """What tiles cut: a convolution's group itself, a matmul's over views."""
    return record.contraction if isinstance(record, Product) else record


def match(root: Node, users: Users) -> Product | str:
    """The product that ends in `root`, or why there is none."""
    chain = parse(root, users, lambda n: isinstance(n.op, ops.Matmul))
    if isinstance(chain, str):
        return chain
    reason = _refused(chain)
    if reason is not None:
        return reason
    x, (w, _) = chain.source.arg(0), _weight(chain.source)
    lies = _as_it_lies(x)
    program = prod(d for d in w.shape if isinstance(d, int)) < SMALL and sample.parse(root, users)
    if isinstance(program, sample.SampleProgram):
        return f"{root!r} is small enough for one block per sample"
    fold = chain.stages[-1]
    assert isinstance(fold, Fold)
    by_sample = lies is not None or any(d < x.ndim - 1 for d in fold.op.dims)
    views: dict[Node, Node] = {}
    last = _over_views(chain, by_sample, views)
    if isinstance(last, str):
        return last
    found = contraction.match(last, Graph((), (last,)).users())
    if isinstance(found, str):
        return found
    real = {view: node for node, view in views.items()}
    tensors = tuple(real.get(n, n) for n in found.tensors)
    found = replace(found, channels_last=lies is None, writes_last=lies is None)
    return Product(root, found, tensors, by_sample, lies is not None)


def _weight(matmul: Node) -> tuple[Node, bool]:
    """The weight of all rows as it lies in memory, be it repeated for every sample; and whether that is (N, K)."""
    assert isinstance(matmul.op, ops.Matmul)
    w, features_first = matmul.arg(1), matmul.op.transpose_w
    if isinstance(w.op, ops.Expand) and w.shape[-2:] == w.arg(0).shape:
        w = w.arg(0)
    if isinstance(w.op, ops.Permute) and w.op.dims == (1, 0):
        return w.arg(0), not features_first
    return w, features_first


def _as_it_lies(x: Node) -> Node | None:
    """What x is a turned view of: (N, K, M)."""
    turned = isinstance(x.op, ops.Permute) and not x.op.copy and x.op.dims == (0, 2, 1)
    return x.arg(0) if turned else None


def _refused(chain: Chain) -> str | None:
    """Why a matmul and what follows it are no product, or `None`."""
    matmul, stages = chain.source, chain.stages
    x, (w, _) = matmul.arg(0), _weight(matmul)
    if w.ndim != 2 or not all(isinstance(d, int) for d in w.shape):
        return f"{matmul!r} multiplies two computed values"
    *ahead, last = stages or (None,)
    if not isinstance(last, Fold) or len(ahead) > 1 or not all(isinstance(stage, Map) for stage in ahead):
        return "a product ends in one reduction, behind pointwise operations at most"
    features, tokens = {x.ndim - 1}, set(range(1, x.ndim - 1))
    if set(last.op.dims) not in (features, tokens, features | tokens) or not last.op.dims:
        return "the reduction is over some of the tokens only"
    return None


def _over_views(chain: Chain, by_sample: bool, views: dict[Node, Node]) -> Node | str:
    """The chain's last node over a convolution (N, O, 1, M); `views` gets what x, weight and operands are seen as."""
    matmul, fold = chain.source, chain.stages[-1]
    assert isinstance(fold, Fold)
    x, bias, lies, (w, features_first) = matmul.arg(0), matmul.args[2], _as_it_lies(matmul.arg(0)), _weight(matmul)
    samples, rows = (x.shape[0], x.shape[1:-1]) if by_sample else (1, x.shape[:-1])
    if lies is not None:
        image = views[lies] = reshape(lies, (samples, x.shape[-1], 1, prod(rows)))
    else:
        image = views[x] = permute(reshape(x, (samples, 1, prod(rows), x.shape[-1])), (0, 3, 1, 2))
    views[w] = reshape(w, (*w.shape, 1, 1))
    # A weight (K, O) is one of a transposed convolution, which for one tap is a convolution.
    conv = ops.Conv((1, 1), ((0, 0),) * 2, (1, 1), 1, not features_first, (0, 0))
    value = make(conv, image, views[w], bias, where=matmul.where)
    for stage in chain.stages[:-1]:
        assert isinstance(stage, Map)
        tree = _tree(stage, value, matmul, views)
        if isinstance(tree, str):
            return tree
        value = tree
    features, tokens = x.ndim - 1 in fold.op.dims, any(d < x.ndim - 1 for d in fold.op.dims)
    dims = (*((1,) if features else ()), *((2, 3) if tokens else ()))
    return make(replace(fold.op, dims=dims, keepdim=True, first=False), value)


def _tree(stage: Map, value: Node, matmul: Node, views: dict[Node, Node]) -> Node | str:
    """A pointwise tree on `value`, its operands as numbers per channel."""
    new = {stage.value: value}
    for leaf in leaves(stage):
        if leaf is not stage.value:
            seen = _operand(leaf, matmul)
            if seen is None:
                return f"operand {leaf!r} is neither a number nor one number per feature"
            new[leaf] = views[leaf] = seen
    for node in topological([stage.root], new):
        new[node] = remade(node, [None if a is None else new[a] for a in node.args])
    return new[stage.root]


def _operand(node: Node, matmul: Node) -> Node | None:
    """A number, or numbers per feature, as an operand of the convolution's output."""
    match varies(node, matmul):
        case "":
            return node if node.ndim == 0 else reshape(node, (1, 1, 1, 1))
        case "feature":
            return reshape(node, (1, matmul.shape[-1], 1, 1))
    return None
