"""Calls that stand for several operations: understood, and the same values and gradients as eager's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from fusewright.capture import capture, spelled
from fusewright.ir.ops import Matmul, Nll, Opaque, Permute, Pointwise, Reduce, Reshape, Softmax
from tests.capture.harness import Fn, check, kinds, opaque, program_of, resized


def r(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


def positive(*shape: int) -> Tensor:
    return r(*shape).detach().abs().requires_grad_()


MULTIPLIED, SUBTRACTED = "use_mm_for_euclid_dist", "donot_use_mm_for_euclid_dist"
ROW, IMAGE = (4, 6), (4, 8, 6, 10)
WEIGHTS, SIGNS = positive(6).detach(), torch.where(r(*ROW) > 0, 1.0, -1.0).double()
Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]

PLACES = torch.tensor([[0, 3, 9], [1, 1, 2], [5, 0, 1], [8, 7, 0]])
UNDERSTOOD: list[Case] = [
    ("glu", F.glu, (r(*ROW),)),
    ("glu over channels", lambda x: F.glu(x, 1), (r(*IMAGE),)),
    ("pixel shuffle", lambda x: F.pixel_shuffle(x, 2), (r(*IMAGE),)),
    ("pixel unshuffle", lambda x: F.pixel_unshuffle(x, 2), (r(*IMAGE),)),
    ("mse", F.mse_loss, (r(*ROW), r(*ROW) * 2)),
    ("mse, summed", lambda x, t: F.mse_loss(x, t, reduction="sum"), (r(*ROW), r(*ROW) * 2)),
    ("mse, each", lambda x, t: F.mse_loss(x, t, reduction="none"), (r(*ROW), r(*ROW) * 2)),
    ("smooth l1", F.smooth_l1_loss, (r(*ROW) * 2, r(*ROW))),
    ("smooth l1, wide", lambda x, t: F.smooth_l1_loss(x, t, beta=2.5), (r(*ROW) * 3, r(*ROW))),
    ("huber", lambda x, t: F.huber_loss(x, t, delta=0.5), (r(*ROW) * 2, r(*ROW))),
    ("cross entropy of logits", F.binary_cross_entropy_with_logits, (r(*ROW), positive(*ROW))),
    (
        "weighted logits",
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, WEIGHTS[0], pos_weight=WEIGHTS),
        (r(*ROW), positive(*ROW)),
    ),
    (
        "logits, what is true weighted",
        lambda x, t: F.binary_cross_entropy_with_logits(x, t, pos_weight=torch.tensor(2.5), reduction="none"),
        (r(*ROW), positive(*ROW)),
    ),
    ("soft margin", lambda x: F.soft_margin_loss(x, SIGNS), (r(*ROW) * 3,)),
    ("soft margin, each", lambda x: F.soft_margin_loss(x, SIGNS, reduction="none"), (r(*ROW) * 3,)),
    ("hinge", lambda x, t: F.hinge_embedding_loss(x * 2, t), (r(*ROW), SIGNS)),
    ("hinge, each", lambda x, t: F.hinge_embedding_loss(x, t, 0.5, reduction="none"), (r(*ROW), SIGNS)),
    ("cosine", F.cosine_embedding_loss, (r(*ROW), r(*ROW) * 2 + 1, SIGNS[:, 0])),
    ("cosine, of ones", lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(4)), (r(*ROW), r(*ROW) * 2 + 1)),
    (
        "cosine, summed",
        lambda x, y, t: F.cosine_embedding_loss(x, y, t, margin=0.1, reduction="sum"),
        (r(*ROW), r(*ROW) * 2 + 1, SIGNS[:, 0]),
    ),
    ("addcmul", lambda x, a, b: torch.addcmul(x, a, b, value=0.5), (r(*ROW), r(*ROW), r(1, 6))),
    ("addcdiv", lambda x, a, b: torch.addcdiv(x, a, b, value=2), (r(*ROW), r(*ROW), positive(1, 6))),
    ("lerp, near", lambda x, y: torch.lerp(x, y, 0.25), (r(*ROW), r(*ROW) * 2)),
    ("lerp, far", lambda x, y: torch.lerp(x, y, 0.75), (r(*ROW), r(*ROW) * 2)),
    ("prelu", F.prelu, (r(*IMAGE), r(8))),
    ("repeat", lambda x: x.repeat(1, 3) + 1, (r(*ROW),)),
    ("repeat in front", lambda x: x.repeat(2, 1, 3) + 1, (r(*ROW),)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1) + 1, (r(*ROW),)),
    ("xlogy", torch.xlogy, (r(*ROW), positive(*ROW))),
    ("std", lambda x: x.std(1), (r(*ROW),)),
    ("std, biased", lambda x: torch.std(x, (1, 2), correction=0, keepdim=True), (r(*IMAGE),)),
    ("var_mean", lambda x: torch.var_mean(x, (2, 3)), (r(*IMAGE),)),
    ("std_mean", lambda x: torch.std_mean(x, -1), (r(*ROW),)),
    ("norm", lambda x: x.norm(dim=1), (r(*ROW),)),
    ("norm of all", torch.norm, (r(*ROW),)),
    ("norm, 1", lambda x: torch.linalg.vector_norm(x, 1, (1, 3)), (r(*IMAGE),)),
    ("norm, infinity", lambda x: torch.linalg.vector_norm(x, torch.inf, 1, keepdim=True), (r(*ROW),)),
    ("norm, -infinity", lambda x: torch.linalg.vector_norm(x, -torch.inf, 1), (r(*ROW),)),
    ("norm, 3", lambda x: x.norm(3, dim=1), (r(*ROW),)),
    ("norm, 1.5", lambda x: torch.linalg.vector_norm(x, 1.5, (1, 3), keepdim=True), (r(*IMAGE),)),
    ("dist", torch.dist, (r(*ROW), r(1, 6))),
    ("dist, 3", lambda x, y: torch.dist(x, y, 3), (r(*ROW), r(*ROW) * 2)),
    ("aminmax", lambda x: tuple(torch.aminmax(x, dim=1, keepdim=True)), (r(*ROW),)),
    ("aminmax of all", lambda x: tuple(torch.aminmax(x)), (r(*ROW),)),
    ("normalize", F.normalize, (r(*ROW),)),
    ("einsum of weights", lambda x, w: torch.einsum("bijl,lk->bijk", x, w), (r(*IMAGE), r(10, 3))),
    ("einsum of heads", lambda q, k: torch.einsum("bhid,bhjd->bhij", q, k), (r(*IMAGE), r(*IMAGE) * 2)),
    ("einsum, summed", lambda x: torch.einsum("bchw->bc", x), (r(*IMAGE),)),
    ("tensordot", lambda x, w: torch.tensordot(x, w, 1), (r(*ROW), r(6, 3))),
    ("outer", torch.outer, (r(4), r(6))),
    ("cosine similarity", F.cosine_similarity, (r(*ROW), r(*ROW) * 2 + 1)),
    ("distances", lambda x, y: torch.cdist(x, y, compute_mode=MULTIPLIED), (r(*ROW), r(5, 6))),
    ("distances of samples", lambda x, y: torch.cdist(x, y).square(), (r(4, 9, 6), r(4, 30, 6))),
    ("distances of samples to themselves", lambda x: torch.exp(-torch.cdist(x, x * 2)), (r(4, 30, 6),)),
    ("distances of samples to the same", lambda x, y: torch.cdist(x, y), (r(4, 9, 6), r(30, 6))),
    ("distances of the same to samples", lambda x, y: torch.cdist(y, x), (r(4, 9, 6), r(30, 6))),
    ("distances of samples of samples", torch.cdist, (r(4, 1, 30, 6), r(3, 9, 6))),
    ("l1", F.l1_loss, (r(*ROW), r(*ROW) * 2)),
    ("kl_div", lambda x, t: F.kl_div(x, t, reduction="batchmean"), (r(*ROW), positive(*ROW))),
    ("triplet", F.triplet_margin_loss, (r(*ROW), r(*ROW) * 2, r(*ROW) + 1)),
    ("pairwise distance", F.pairwise_distance, (r(*ROW), r(*ROW) * 2)),
    ("margin ranking", F.margin_ranking_loss, (r(4), r(4) * 2, r(4).sign())),
    ("poisson", F.poisson_nll_loss, (r(*ROW), positive(*ROW))),
    ("diff", torch.diff, (r(*ROW),)),
    ("tile", lambda x: x.tile(1, 3) + 1, (r(*ROW),)),
    ("tile of the last dimensions", lambda x: x.tile((2, 1)) * 2, (r(*IMAGE),)),
    ("tile in front", lambda x: x.tile(2, 1, 3) + 1, (r(*ROW),)),
    ("triu", torch.triu, (r(4, 5, 5),)),
    ("triu below", lambda x: x.triu(-2) * 2, (r(4, 5, 7),)),
    ("tril", lambda x: torch.tril(x, 1), (r(4, 7, 5),)),
    ("tril of a product", lambda x, y: torch.tril(x @ y.transpose(1, 2)), (r(4, 5, 3), r(4, 5, 3) * 2)),
    ("kron", torch.kron, (r(4, 3), r(2, 5))),
    ("kron of vectors", lambda x, y: torch.kron(x, y) + 1, (r(4), r(6))),
    ("embedding_bag", lambda w: F.embedding_bag(PLACES, w.t()), (r(6, 10),)),
    ("embedding_bag, summed", lambda w: F.embedding_bag(PLACES, w.t(), mode="sum"), (r(6, 10),)),
    (
        "embedding_bag, weighted",
        lambda own, w: F.embedding_bag(PLACES, w, mode="sum", per_sample_weights=own),
        (r(4, 3), r(10, 6)),
    ),
    ("mv", torch.mv, (r(*ROW), r(6))),
    ("dot", torch.dot, (r(6), r(6) * 2)),
    ("inner", torch.inner, (r(*ROW), r(3, 6))),
    ("addmm", lambda b, x, w: torch.addmm(b, x, w), (r(3), r(*ROW), r(6, 3))),
    ("addmm of a matrix", lambda x, w, b: torch.addmm(b, x, w), (r(*ROW), r(6, 3), r(4, 3))),
    ("addmm, scaled", lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2), (r(*ROW), r(6, 3), r(3))),
    ("baddbmm", lambda x, w, b: torch.baddbmm(b, x, w), (r(4, 5, 6), r(4, 6, 3), r(4, 1, 3))),
    ("baddbmm, scaled", lambda x, w, b: torch.baddbmm(b, x, w, beta=2, alpha=0.5), (r(4, 5, 6), r(4, 6, 3), r(3))),
    ("softmin", lambda x: F.softmin(x, 1), (r(*ROW),)),
]  # fmt: skip


def gradients(outputs: Any, inputs: tuple[Tensor, ...]) -> list[Tensor | None]:
    tensors = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if t.requires_grad]
    weights = [torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).reshape(t.shape) for t in tensors]
    leaves = [x.detach().requires_grad_() if not x.is_leaf else x for x in inputs]
    return list(torch.autograd.grad(tensors, leaves, weights, allow_unused=True))


def compared(fn: Callable[..., Any], args: tuple[Tensor, ...], **how: Any) -> None:
    """The captured program on `args`, with its gradients, beside eager."""
    model = Fn(fn)
    captured = capture(model, args, {})
    assert opaque(captured) == []
    program = program_of(captured)
    for given in (args, resized(args, len(args[0]), 3)) if captured.graph.symbols else (args,):
        leaves = [x.detach().requires_grad_() for x in given]
        found, expected = program(model, tuple(leaves), {}), fn(*leaves)
        assert_close(found, expected, **how)
        assert_close(gradients(found, tuple(leaves)), gradients(expected, tuple(leaves)), **how)


@pytest.mark.parametrize(("fn", "args"), [c[1:] for c in UNDERSTOOD], ids=[c[0] for c in UNDERSTOOD])
def test_understood(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    compared(fn, args, rtol=1e-12, atol=1e-12)


CLASSES = torch.tensor([0, 2, 5, 2])
OF_CLASSES: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], list[type]]] = [
    ("cross entropy", F.cross_entropy, (r(*ROW), CLASSES), [Softmax, Nll]),
    (
        "of positions, weighted, one of them ignored",
        lambda x, t: F.cross_entropy(x, t, torch.arange(8.0).double(), ignore_index=2, reduction="sum"),
        (r(*IMAGE), torch.arange(240).reshape(4, 6, 10) % 8),
        [Softmax, Nll],
    ),
    ("each", lambda x, t: F.nll_loss(x.log_softmax(1), t, reduction="none"), (r(*ROW), CLASSES), [Softmax, Nll]),
    ("of what is given", F.nll_loss, (r(*ROW), CLASSES), [Nll]),
]


@pytest.mark.parametrize(("fn", "args", "expected"), [c[1:] for c in OF_CLASSES], ids=[c[0] for c in OF_CLASSES])
def test_losses_of_classes(fn: Callable[..., Any], args: tuple[Tensor, ...], expected: list[type]) -> None:
    assert [kind for kind in kinds(check(Fn(fn), *args)) if kind in (Softmax, Nll)] == expected


@pytest.mark.parametrize("smoothing", [0.1, 1.0])
@pytest.mark.parametrize("ignored", [-100, 2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("shape", [ROW, IMAGE])
def test_smoothed_classes(
    shape: tuple[int, ...], reduction: str, weighted: bool, ignored: int, smoothing: float
) -> None:
    x, classes = r(*shape), torch.arange(5 * shape[0]).reshape(shape[0], 5)[:, :1] % shape[1]
    classes = classes.reshape(shape[0], *(1,) * (len(shape) - 2)).expand(shape[0], *shape[2:]).contiguous()
    weight = torch.linspace(0.2, 1, shape[1]).double() if weighted else None
    how: dict[str, Any] = {"ignore_index": ignored, "reduction": reduction, "label_smoothing": smoothing}
    compared(lambda x: F.cross_entropy(x, classes[: x.shape[0]], weight, **how), (x,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_smoothed_classes_of_half_precision(dtype: torch.dtype) -> None:
    model, x = Fn(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1)), r(8, 40).detach().to(dtype)
    classes = torch.arange(8)
    found, want = program_of(capture(model, (x, classes)))(model, (x, classes), {}), model(x, classes)
    assert found.dtype == dtype
    assert_close(found, want)


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("smoothing", [0.1, 1.0])
def test_smoothed_classes_that_are_not_finite(value: float, smoothing: float) -> None:
    """In the place of the class, in another, in all, and in a row that is ignored; and where all are."""
    x, classes = torch.randn(5, 6), torch.tensor([0, 1, 2, -100, 4])
    x[0, 0] = x[1, 3] = value
    x[2] = x[3] = value
    for reduction in ("none", "sum", "mean"):
        model = Fn(lambda x, t, how=reduction: F.cross_entropy(x, t, reduction=how, label_smoothing=smoothing))
        program = program_of(capture(model, (x, classes)))
        for given in (classes, torch.full_like(classes, -100)):
            assert_close(program(model, (x, given), {}), model(x, given), equal_nan=True)


EQUATIONS: list[tuple[str, tuple[tuple[int, ...], ...], list[type]]] = [
    ("bijl,lk->bijk", ((4, 3, 5, 6), (6, 2)), [Matmul]),
    ("bhid,bhjd->bhij", ((4, 3, 5, 6), (4, 3, 7, 6)), [Permute, Matmul]),
    ("bhij,bhjd->bhid", ((4, 3, 5, 7), (4, 3, 7, 6)), [Matmul]),
    ("bihd,bjhd->bhij", ((4, 5, 3, 6), (4, 7, 3, 6)), [Permute, Permute, Matmul]),
    ("bhij,bjhd->bihd", ((4, 3, 5, 7), (4, 7, 3, 6)), [Permute, Matmul, Permute]),
    ("bnd,hde->bhne", ((4, 5, 6), (3, 6, 2)), [Permute, Reshape, Matmul, Reshape, Permute]),
    ("b h i d, b h j d -> b h i j", ((4, 3, 5, 6), (4, 3, 7, 6)), [Permute, Matmul]),
    ("...id,...jd->...ij", ((4, 3, 5, 6), (4, 3, 7, 6)), [Permute, Matmul]),
    ("...d,de", ((4, 3, 6), (6, 2)), [Matmul]),
    ("ij,jk", ((4, 6), (6, 2)), [Matmul]),
    ("bij,bjk->kbi", ((4, 3, 6), (4, 6, 2)), [Permute, Permute, Matmul, Permute]),
    ("bid,bjd->bji", ((4, 3, 6), (4, 5, 6)), [Permute, Matmul]),
    ("bixd,bjd->bijx", ((4, 3, 2, 6), (4, 5, 6)), [Reshape, Permute, Matmul, Reshape, Permute]),
    ("bnd,hde->hbne", ((4, 5, 6), (3, 6, 2)), [Permute, Reshape, Matmul, Reshape, Permute]),
    ("bxyc,bcz->bxyz", ((4, 3, 5, 6), (4, 6, 2)), [Reshape, Matmul, Reshape]),
    ("bcxy,bcxy->b", ((4, 3, 5, 6), (4, 3, 5, 6)), [Reshape, Reshape, Matmul, Reshape]),
    ("bi,bj->bij", ((4, 5), (4, 6)), [Reshape, Reshape, Pointwise]),
    ("bi,bi->ib", ((4, 5), (4, 5)), [Permute, Permute, Pointwise]),
    ("bi,c->bic", ((4, 5), (3,)), [Reshape, Reshape, Pointwise]),
    ("bij,bk->bk", ((4, 5, 6), (4, 3)), [Reduce, Reshape, Pointwise]),
    ("bij,jk->bk", ((4, 5, 6), (6, 3)), [Permute, Reduce, Matmul]),
    ("bchw->bc", ((4, 3, 5, 6),), [Reduce]),
    ("bchw->hbwc", ((4, 3, 5, 6),), [Permute]),
    ("i,i->", ((6,), (6,)), [Reshape, Reshape, Matmul, Reshape]),
]


@pytest.mark.parametrize(("equation", "shapes", "expected"), EQUATIONS, ids=[e[0] for e in EQUATIONS])
def test_einsum(equation: str, shapes: tuple[tuple[int, ...], ...], expected: list[type]) -> None:
    args = tuple(r(*shape) for shape in shapes)

    def fn(*xs: Tensor) -> Tensor:
        return torch.einsum(equation, *xs)

    compared(fn, args, rtol=1e-12, atol=1e-12)
    captured = capture(Fn(fn), args)
    assert kinds(captured) == expected
    assert program_of(captured)(Fn(fn), args, {}).stride() == fn(*args).stride()


def test_einsum_lies_as_eager_has_it() -> None:
    """What one operand alone has is summed in the order of the result, wherever it lay."""
    x, y = r(4, 2, 5, 5).permute(3, 2, 0, 1), r(2, 3)
    model = Fn(lambda x, y: torch.einsum("ebzA,dc->be", x, y))
    assert program_of(capture(model, (x, y)))(model, (x, y), {}).stride() == model(x, y).stride() == (5, 1)


@pytest.mark.parametrize("equation", ["bii->bi", "bij,bij,bij->b", "bij,bkj->bik"])
def test_einsum_of_other_kinds(equation: str) -> None:
    """Diagonals stay a call, more operands are composed as PyTorch does; so are sizes of 1 that are repeated."""
    terms = equation.partition("->")[0].split(",")
    args = tuple(r(4, 1 if i else 3, 3) for i in range(len(terms)))
    captured = check(Fn(lambda *xs: torch.einsum(equation, *xs)), *args)
    assert opaque(captured) == (["einsum"] if equation.startswith("bii") else [])


ZEROS, STEPS = torch.zeros(4, 6).double(), torch.arange(24.0).reshape(4, 6).double() / 4
ODD = torch.tensor([torch.nan, 0.0, 1.0, -1.0, 0.3, -0.3]).double().repeat(4, 1)
EDGES: list[Case] = [
    ("norm of zeros", lambda x: x.norm(dim=1), (ZEROS,)),
    ("norm of zeros, 3", lambda x: x.norm(3, dim=1), (ZEROS,)),
    ("norm of NaN, 3", lambda x: x.norm(3, dim=1), (ODD,)),
    ("distance of equals, 1.5", lambda x, y: torch.dist(x, y, 1.5), (STEPS, STEPS.clone())),
    ("least and greatest of equals", lambda x: tuple(torch.aminmax(x, dim=1)), (ZEROS,)),
    ("soft margin of large ones", lambda x: F.soft_margin_loss(x, SIGNS, reduction="none"), (ODD * 1000,)),
    ("hinge of NaN", lambda x, t: F.hinge_embedding_loss(x, t, reduction="none"), (ODD, SIGNS)),
    ("cosine of zeros", F.cosine_embedding_loss, (ZEROS, r(*ROW), SIGNS[:, 0])),
    ("weighted logits of NaN", lambda x: F.binary_cross_entropy_with_logits(x, ZEROS, pos_weight=WEIGHTS), (ODD,)),
    ("normalized zeros", F.normalize, (ZEROS,)),
    ("similarity of zeros", F.cosine_similarity, (ZEROS, r(*ROW))),
    ("deviation of constants", lambda x: x.std(1), (torch.ones(4, 6, dtype=torch.float64),)),
    ("distances of equals", lambda x: torch.cdist(x, x, compute_mode=MULTIPLIED), (STEPS.repeat(1, 3)[:, ::2],)),
    ("distances of equals, squared", lambda x: torch.cdist(x, x, compute_mode=MULTIPLIED).square(), (STEPS,)),
    ("distances of NaN", lambda x: torch.cdist(x, x, compute_mode=MULTIPLIED), (ODD * STEPS,)),
    ("smooth l1 at its bend", F.smooth_l1_loss, (STEPS, ZEROS)),
    ("huber of NaN", lambda x, t: F.huber_loss(x, t, reduction="none"), (ODD, ZEROS)),
    ("smooth l1 of NaN", lambda x, t: F.smooth_l1_loss(x, t, reduction="none", beta=0.3), (ODD, ZEROS)),
    ("huber at its bend", F.huber_loss, (STEPS, ZEROS)),
    ("prelu at zero", F.prelu, (ZEROS, r(1))),
    ("xlogy at zero", lambda x: torch.xlogy(x, x + 1), (ZEROS,)),
    ("kl_div at zero", lambda x, t: F.kl_div(x, t), (r(*ROW), ZEROS)),
    ("triu of NaN", torch.triu, (ODD[:, None] * STEPS[:, :, None],)),
    ("norm of infinity, of equals", lambda x: x.norm(torch.inf, 1), (torch.ones(4, 6, dtype=torch.float64),)),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args"), [c[1:] for c in EDGES], ids=[c[0] for c in EDGES])
def test_gradients_at_edges(fn: Callable[..., Any], args: tuple[Tensor, ...]) -> None:
    """Where a composition of the same functions has another gradient, or none."""
    compared(fn, args, rtol=1e-12, atol=1e-12, equal_nan=True)


LEFT: list[tuple[str, Callable[..., Any], tuple[Tensor, ...], str]] = [
    ("attention", F.scaled_dot_product_attention, (r(4, 2, 3, 5),) * 3, "scaled_dot_product_attention"),
    (
        "smoothed class of one row",
        lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
        (r(6), torch.tensor(2)),
        "cross_entropy_loss",
    ),
    ("classes of one row", F.cross_entropy, (r(6), torch.tensor(2)), "cross_entropy_loss"),
    ("distances of few", torch.cdist, (r(4, 25, 6), r(4, 25, 6)), "cdist"),
    ("distances by subtraction", lambda x: torch.cdist(x, x, compute_mode=SUBTRACTED), (r(4, 30, 6),), "cdist"),
    ("distances of another exponent", lambda x: torch.cdist(x, x, p=1.5), (r(4, 30, 6),), "cdist"),
    ("distances of half precision", torch.cdist, (r(4, 30, 6).half(), r(4, 9, 6).half()), "cdist"),
    ("another exponent", lambda x: x.norm(0.5, dim=1), (r(*ROW),), "linalg_vector_norm"),
    ("repeated once", lambda x: x.repeat(1, 1), (r(*ROW),), "repeat"),
    ("bags", lambda w: F.embedding_bag(PLACES[0], w, torch.tensor([0, 1])), (r(10, 6),), "embedding_bag"),
    ("greatest of bags", lambda w: F.embedding_bag(PLACES, w, mode="max"), (r(10, 6),), "embedding_bag"),
    ("bags with padding", lambda w: F.embedding_bag(PLACES, w, padding_idx=1), (r(10, 6),), "embedding_bag"),
    ("triangle of a batch", torch.tril, (r(4, 5),), "tril"),
    ("sum of half precision", torch.addmm, (r(4, 3).half(), r(4, 6).half(), r(6, 3).half()), "addmm"),
    ("sum of nothing", lambda x, w, b: torch.addmm(b, x, w, beta=0), (r(4, 6), r(6, 3), r(4, 3)), "addmm"),
    ("product of half precision", torch.dot, (r(6).half(), r(6).half()), "dot"),
    ("repeated and returned", lambda x: x[:, :1].repeat(1, 3), (r(*ROW),), "repeat"),
]  # fmt: skip


@pytest.mark.parametrize(("fn", "args", "name"), [c[1:] for c in LEFT], ids=[c[0] for c in LEFT])
def test_left_as_they_are(fn: Callable[..., Any], args: tuple[Tensor, ...], name: str) -> None:
    captured = capture(Fn(fn), args)
    assert [n.op.target.split(".")[1] for n in captured.graph.nodes() if isinstance(n.op, Opaque)][-1] == name


def test_how_distances_are_found_holds_for_a_range_of_rows() -> None:
    """Up to 25 of both PyTorch subtracts, so that a graph that multiplies is for more, or for what it was shown."""
    x, y = r(40, 6), r(10, 6)
    captured = capture(Fn(lambda x: torch.cdist(x, y.detach()).sqrt()), (x,))
    assert opaque(captured) == [] and Matmul in kinds(captured)
    assert [place.low for place in captured.graph.symbols.values()] == [26]
    few = capture(Fn(lambda x: torch.cdist(x, y.detach()).sqrt()), (x[:20],))
    assert opaque(few) == ["cdist"]
    assert few.static is not None or [place.high for place in few.graph.symbols.values()] == [25]


def test_distances_are_no_views() -> None:
    """A composition ends in one, which is all that there is of what it shows."""
    captured = capture(Fn(torch.cdist), (r(40, 6), r(30, 6)))
    assert kinds(captured)[-2:] == [Pointwise, Pointwise]


def test_a_composition_whose_parts_are_not_all_understood_stays_one_call() -> None:
    """Its parts would be slower than the call; what is around it is understood all the same."""
    smoothed = Fn(lambda x, t: F.cross_entropy((x * 2).sum(0), t, label_smoothing=0.1) + x.norm())
    captured = check(smoothed, r(*ROW), torch.tensor(3))
    assert opaque(captured) == ["cross_entropy_loss"]
    assert any(kind is Reduce for kind in kinds(captured))


def test_one_tensor_given_twice_stands_for_two() -> None:
    x, y, model = r(*ROW), r(*ROW), Fn(lambda a, b: a * 2 - b)
    captured = capture(model, (x, x))
    assert len(captured.graph.inputs) == 2
    assert_close(program_of(captured)(model, (x, y * 3), {}), x * 2 - y * 3)


def test_compositions_remember_their_place() -> None:
    class Inner(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.l1_loss(x, 2 * x)

    captured = capture(torch.nn.Sequential(torch.nn.Identity(), Inner()), (r(*ROW),))
    assert {n.where for n in captured.graph.nodes() if n.args} == {"1"}


def test_a_composition_that_cannot_be_traced_stays_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tracer is no documented interface."""

    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("another interface")

    monkeypatch.setattr(spelled, "make_fx", refuse)
    assert opaque(check(Fn(lambda x: F.l1_loss(x, x * 2)), r(*ROW))) == ["broadcast_tensors", "l1_loss"]
