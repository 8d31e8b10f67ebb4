"""Contraction kernels for CPUs: compiled, run, and compared with the model in float64."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from codegen.cuda.contraction_cases import Case, Found, draw, draw_boxed, find, tolerance
from torch import Tensor, nn

import fusewright
from fusewright.capture import capture
from fusewright.codegen.cpu import contraction as cpu
from fusewright.ir import ops
from fusewright.kernel import Kernel
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.runtime.launch import Launcher
from fusewright.runtime.native import launcher
from fusewright.schedule import contraction
from fusewright.schedule.cost import Work
from fusewright.schedule.strips import Strips, candidates, is_channelwise
from fusewright.schedule.window_ends import at_ends

GOLDEN = Path(__file__).parents[2] / "golden"
F16, BF16, F64 = torch.float16, torch.bfloat16, torch.float64
nan, inf = float("nan"), float("inf")

CASES = {
    "plain": Case((9, 13), 5, 20, before=("relu", "add channel")),
    "padded": Case((7, 11), 3, 5, (2, 5), (2, 1), (1, 3), (2, 1), bias=False),
    "same": Case((6, 9), 9, 17, (4, 3), padding="same"),
    "grouped": Case((8, 12), 2, 3, groups=4, before=("times channel",), fold="mean", fold_dims="p"),
    "one dimension": Case((37,), 5, 40, (5,), (2,), (2,), (1,), pool="max", window=(3,), step=(2,), pool_padding=(1,)),
    "long rows": Case((3, 700), 2, 3, (1, 4), fold="sum", fold_dims="cp"),
    "many channels": Case((5, 6), 300, 33, before=("gelu",)),
    "flat": Case((5, 7), 40, 70, (1, 1), before=("hardswish",), fold="mean", fold_dims="p", batch=1),
    "planes of one row": Case((6, 5, 7), 40, 20, (3, 1, 1), (1, 1, 1), (1, 0, 0), (1, 1, 1), before=("gelu",)),
    "planes of one row, channels last": Case((6, 5, 7), 9, 20, (1, 1, 1), (2, 1, 1), (0, 0, 0), (1, 1, 1), fold="max",
                                             fold_dims="p", channels_last=True),
    "rows of all planes": Case((6, 5, 7), 9, 20, (1, 1, 4), (1, 1, 2), (0, 0, 1), (1, 1, 1), transposed=True,
                               output_padding=(0, 0, 0), before=("relu",)),
    "one row between": Case((17, 9), 4, 6, (1, 1), (3, 2)),
    "windows, then all": Case(
        (17, 23), 3, 24, before=("tanh", "scale"), pool="max", window=(4, 2), step=(4, 2), after=("gate",), fold="sum",
        fold_dims="cp",
    ),
    "overlapping windows": Case(
        (12, 11), 4, 9, pool="avg", window=(3, 2), step=(2, 1), pool_padding=(1, 1), ceil_mode=True, include_pad=False,
        before=("shift",), after=("both",),
    ),
    "stem": Case((23, 30), 3, 20, (7, 7), (2, 2), (3, 3), before=("relu",), pool="max", window=(3, 3), step=(2, 2),
                 pool_padding=(1, 1)),
    "divisor": Case((9, 10), 3, 4, pool="avg", window=(2, 3), step=(2, 3), divisor=7, pool_padding=(1, 0)),
    "three dimensions": Case(
        (6, 9, 8), 3, 16, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), before=("divide",), pool="max", window=(2, 2, 2),
        step=(2, 2, 2), fold="mean", fold_dims="p",
    ),
    "transposed": Case((5, 7), 6, 5, (3, 4), (2, 3), (1, 0), transposed=True, output_padding=(1, 0)),
    "transposed, dilated": Case((6, 5), 3, 4, (3, 3), (2, 2), (2, 1), (2, 3), transposed=True, before=("relu",)),
    "transposed, holes": Case((4, 5), 3, 4, (2, 1), (3, 3), transposed=True, fold="max", fold_dims="c"),
    "transposed, pooled": Case(
        (4, 5, 3), 3, 9, (5, 3, 4), (2, 2, 1), (2, 1, 0), (1, 1, 1), transposed=True, output_padding=(0, 0, 0),
        pool="max", window=(4, 2, 2), step=(4, 2, 2), fold="sum", fold_dims="c",
    ),
    "transposed, windows between strides": Case(
        (6, 7), 5, 20, (3, 2), (3, 2), (1, 0), (1, 2), transposed=True, pool="max", window=(5, 4), step=(2, 3),
        pool_padding=(2, 1), before=("scale",), after=("both",),
    ),
    "transposed, overlapping windows": Case(
        (5, 4, 6), 3, 4, (2, 3, 1), (2, 3, 2), (0, 1, 0), (1, 1, 1), groups=3, transposed=True,
        output_padding=(0, 0, 0), pool="avg", window=(3, 3, 3), step=(1, 2, 3), pool_padding=(0, 1, 1), fold="max",
        fold_dims="p",
    ),
    "over channels": Case((8, 9), 4, 37, before=("sigmoid",), fold="max", fold_dims="c", keepdim=True),
    "over channels of groups": Case((8, 9), 2, 5, groups=3, fold="mean", fold_dims="c"),
    "logsumexp": Case((8, 9), 4, 19, fold="logsumexp", fold_dims="p"),
    "logsumexp of all": Case((8, 9), 4, 19, fold="logsumexp", fold_dims="cp"),
    "least": Case((8, 9), 4, 19, fold="min", fold_dims="cp", keepdim=True),
    "float64": Case((9, 9), 5, 11, dtype=F64, before=("tanh",), pool="avg", window=(2, 2), step=(2, 2)),
    "bfloat16": Case((9, 9), 16, 24, dtype=BF16, before=("hardswish",), fold="mean", fold_dims="p"),
    "float16": Case((9, 9), 3, 7, dtype=F16, before=("add channel",), pool="max", window=(2, 2), step=(2, 2)),
    "channels last": Case((9, 11), 5, 20, before=("relu",), channels_last=True),
    "channels last, grouped": Case((9, 11), 70, 3, groups=2, stride=(2, 2), padding=(1, 1), channels_last=True),
    "channels last, bfloat16": Case((4, 6, 5), 3, 20, (2, 3, 1), (1, 1, 1), (1, 1, 0), (1, 1, 1), dtype=BF16,
                                    channels_last=True),
    "depthwise": Case((9, 11), 1, 1, (5, 3), padding=(2, 1), groups=37, before=("hardswish",)),
    "depthwise, three each": Case((12, 13), 1, 3, (3, 3), (2, 1), groups=25, before=("tanh",), pool="max",
                                  window=(2, 3), step=(2, 2), fold="mean", fold_dims="p"),
    "depthwise, channels last": Case((9, 8), 1, 1, (3, 3), (2, 2), (1, 1), groups=70, dtype=BF16, before=("relu",),
                                     channels_last=True),
    "depthwise, channels last, two each": Case((5, 8), 1, 2, (1, 7), groups=9, channels_last=True),
    "depthwise, transposed": Case((5, 7), 1, 2, (3, 4), (2, 3), (1, 0), groups=11, transposed=True, fold="max",
                                  fold_dims="c"),
    "depthwise of all, float64": Case((41,), 1, 1, (7,), (3,), (3,), (2,), groups=19, dtype=F64, before=("gelu",),
                                      fold="logsumexp", fold_dims="cp"),
    "small groups": Case((6, 37), 5, 3, (3, 3), (1, 2), (1, 0), groups=7, before=("relu",)),
    "small groups, transposed": Case((5, 20), 2, 3, (3, 4), (2, 1), (1, 0), groups=9, transposed=True,
                                     before=("tanh",)),
    "small groups, channels last": Case((7, 18), 3, 4, (2, 3), groups=5, channels_last=True, dtype=BF16, fold="max",
                                        fold_dims="p"),
    "mostly outside": Case((3, 4, 2), 5, 19, (5, 7, 3), (1, 2, 1), (2, 5, 2), (1, 1, 1), pool="max", window=(2, 2, 2),
                           step=(2, 2, 2)),
    "mostly outside, transposed": Case((3, 4), 70, 9, (7, 6), (2, 1), (5, 4), (1, 2), transposed=True, bias=False),
    "chunks over bands": Case((21, 7), 90, 33, (3, 3), padding=(1, 1), before=("relu",)),
    "logsumexp over channels": Case((2, 70), 4, 37, (1, 3), before=("scale",), fold="logsumexp", fold_dims="c"),
    "least of channels of groups": Case((3, 5), 2, 20, groups=3, fold="min", fold_dims="c", dtype=BF16),
    "chunks over planes": Case((4, 3, 3), 70, 20, (3, 3, 3), (1, 1, 1), (1, 1, 1), (1, 1, 1), fold="mean",
                               fold_dims="p"),
    "rows of all lengths": Case((3, 33), 4, 35, (1, 2), before=("gelu",), dtype=F16),
    "columns of one": Case((8, 1), 4, 6, (3, 1), fold="sum", fold_dims="p"),
    "one position": Case((3, 3), 4, 6, pool="max", window=(1, 1), step=(1, 1), batch=1),
}  # fmt: skip
BOXED = {
    "box": Case(
        (26, 30), 4, 20, pool="avg", window=(4, 4), step=(4, 4), after=("sigmoid",), fold="sum", fold_dims="cp"
    ),
    "box of strides": Case((25, 31), 3, 5, (2, 4), (2, 1), (0, 0), (1, 2), pool="avg", window=(3, 2), step=(3, 4)),
    "box, depthwise": Case((19, 17), 1, 1, (3, 3), groups=21, pool="avg", window=(2, 2), step=(2, 2)),
    "box, small groups": Case((19, 17), 3, 2, (3, 3), groups=11, pool="avg", window=(2, 2), step=(2, 2)),
    "box over depth": Case((7, 9, 11), 2, 5, (2, 2, 2), (1, 1, 1), (0, 0, 0), (1, 1, 1), pool="avg", window=(2, 3, 2),
                           step=(2, 3, 2), dtype=F16),
    "box at borders": Case((41,), 6, 19, (5,), (1,), (3,), (2,), pool="avg", window=(4,), step=(4,), fold="min",
                           fold_dims="p"),
    "box at all borders": Case((14, 17), 3, 5, (3, 4), (1, 2), (2, 1), (2, 1), pool="avg", window=(3, 2), step=(3, 2)),
    "box far outside": Case((9, 12), 2, 16, (2, 4), (1, 1), (2, 1), (2, 1), pool="avg", window=(4, 3), step=(4, 3)),
    "box at borders, depthwise": Case((19, 17), 1, 1, (3, 3), padding=(1, 2), groups=21, pool="avg", window=(2, 2),
                                      step=(2, 2)),
}  # fmt: skip


def found(case: Case, boxed: bool = False) -> Found:
    f = find(case, boxed)
    assert isinstance(f, Found), f
    assert (f.group.box is not None) == boxed
    return f


def ways(f: Found, batch: int = 2) -> list[Strips]:
    shape = (f.group.window.node if f.group.window is not None else f.group.conv).shape[2:]
    d, h, w = (*(1,) * (3 - len(shape)), *(int(n) for n in shape))
    return candidates(f.group, (d, h, w), batch)


def kernel(f: Found, strips: Strips) -> Kernel:
    return cpu.kernel(f.group, strips, "fused_test", "def reference(*operands): ...")


def assert_right(f: Found, run: Launcher, x: Tensor, boxed: bool = False) -> None:
    """The kernel itself, not its reference, computes what the model does."""
    got = run(*f.tensors(x))
    layout = f.case.last if f.group.channels_last and not f.case.fold else torch.contiguous_format
    assert got.is_contiguous(memory_format=layout)
    assert_close(f, got, x, boxed)


def assert_close(f: Found, got: Tensor, x: Tensor, boxed: bool) -> None:
    want, size = f.reference(x)
    assert got.shape == want.shape and got.dtype == f.case.dtype
    error = ((got.double() - want).abs() / torch.maximum(size, want.abs().amax()).clamp_min(1e-30)).max().item()
    assert error < tolerance(f.case, boxed), (f.case, error)


@pytest.mark.parametrize("name", [*CASES, *BOXED])
@pytest.mark.sampled
def test_equals_the_model(name: str) -> None:
    boxed = name in BOXED
    f = found((BOXED if boxed else CASES)[name], boxed)
    strips = ways(f)[-1 if name in ("plain", "stem", "transposed") else 0]
    assert_right(f, launcher(kernel(f, strips)), f.case.example(), boxed)


@pytest.mark.parametrize(
    ("window", "step", "padding"),
    [((7,), (7,), (3,)), ((4, 3), (1, 5), (0, 1)), ((2, 4, 3), (2, 3, 1), (0, 2, 1)), ((1, 5), (2, 4), (0, 0))],
)
@pytest.mark.sampled
def test_windows_that_begin_apart(window: tuple[int, ...], step: tuple[int, ...], padding: tuple[int, ...]) -> None:
    """Of a 1x1 convolution nothing but window sums is left, wherever they begin, at several sizes."""
    torch.manual_seed(0)
    n = len(window)
    conv, pool = ((nn.Conv1d, nn.AvgPool1d), (nn.Conv2d, nn.AvgPool2d), (nn.Conv3d, nn.AvgPool3d))[n - 1]
    model = nn.Sequential(conv(5, 19, 1, bias=not any(padding)), pool(window, step, padding), nn.Sigmoid()).eval()
    x = torch.randn(2, 5, *(29, 23, 8)[:n])
    rules = [rule for rule in RULES if rule.name == "sum_P(conv(x, w)) = conv(rangesum_taps(x), w)"]
    graph = rewrite(capture(model, (x,), {}).graph, rules, lambda node: Work(0, 0, 0, 0), mode="always").graph
    c = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(c, contraction.Contraction) and c.box is not None and not c.box.plain
    lengths = (1, 1, *(int(d) for d in c.conv.shape[2:]))[-3:]
    for strips in candidates(c, lengths, 2):
        run = launcher(cpu.kernel(c, strips, "fused_test", "def reference(*operands): ..."))
        tensors = [p.detach() for p in model.parameters()]
        torch.testing.assert_close(
            run(x, *tensors).double(), deepcopy(model).double()(x.double()), rtol=1e-5, atol=1e-5
        )


ENDS = {
    "plain": Case((17, 23), 3, 20, pool="max", window=(3, 3), step=(2, 2), pool_padding=(1, 1), before=("gelu",)),
    "more behind, and ahead": Case(
        (17, 23), 3, 35, bias=False, pool="max", window=(4, 2), step=(4, 2), before=("gate", "times channel", "mish"),
        after=("both",), fold="sum", fold_dims="cp",
    ),
    "half precision": Case((9, 19), 3, 7, dtype=BF16, pool="max", window=(2, 3), step=(2, 3), before=("hardswish",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDS)
def test_windows_of_their_ends(name: str) -> None:
    """Of functions that dip: of the greatest and the least value of each window, NaN and infinities included."""
    case = replace(ENDS[name], batch=4)
    f = found(case)
    f = replace(f, group=at_ends(f.group))
    assert f.group.ends is not None
    made = kernel(f, ways(f)[0])
    assert "void at_end(" in made.source
    assert_right(f, launcher(made), x := case.example())
    for sample, value in zip(x, (nan, inf, -inf), strict=False):
        sample[1, 4, 5] = value
    want, got = f.reference(x)[0], launcher(made)(*f.tensors(x)).double()
    assert want.isnan().any() and got[3:].isfinite().all()
    torch.testing.assert_close(got.isnan(), want.isnan())


@pytest.mark.parametrize("kind", ["sum", "mean", "amax", "amin"])
@pytest.mark.sampled
def test_over_some_of_the_positions(kind: str) -> None:
    """What a strip leaves of such a reduction is a window's: its sum, mean, maximum or minimum."""
    torch.manual_seed(0)

    class Columns(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return getattr(super().forward(x), kind)((2,), keepdim=True)

    model, x = Columns(nn.Conv2d(8, 2, 3, (3, 2)), nn.Tanh()).eval(), torch.randn(2, 8, 15, 13)
    fast = fusewright.optimize(model, (x,), kernels="always", measure=False)
    assert [k.family for k in fusewright.explain(fast).kernels][:1] == ["contraction"]
    with torch.no_grad():
        torch.testing.assert_close(fast(x), model(x))


class Tail(nn.Module):
    """Ends per sample in something that depends on a mean over positions or on a maximum of everything."""

    def __init__(self, kind: str, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind, self.conv = kind, nn.Conv2d(4, 20, 3)
        self.bias, self.head = nn.Parameter(torch.randn(20, 1, 1)), nn.Linear(20, 7)
        self.eval().to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x).relu()
        match self.kind:
            case "logsumexp":
                return (y.mean((2, 3), keepdim=True) + self.bias).logsumexp(1, keepdim=True).sum((2, 3)) * 10
            case "linear":
                return self.head(y.mean((2, 3)))
            case "softmax":
                return (y.amax((2, 3)) * 0.5).softmax(1)
        return (y.amax((1, 2, 3)) + 1).tanh()


@pytest.mark.parametrize("dtype", [torch.float32, F64, BF16], ids=str)
@pytest.mark.parametrize("kind", ["logsumexp", "linear", "softmax", "all"])
@pytest.mark.sampled
def test_tails(kind: str, dtype: torch.dtype) -> None:
    model = Tail(kind, dtype)
    x = torch.randn(3, 4, 9, 11).to(dtype)
    graph = capture(model, (x,), {}).graph
    c = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(c, contraction.Contraction) and c.tail is not None
    run = launcher(cpu.kernel(c, candidates(c, (1, 7, 9), 3)[0], "fused_test", "def reference(*operands): ..."))
    parameters = [model.get_parameter(n.op.path) for n in c.tensors[1:] if isinstance(n.op, ops.Param)]
    got = run(x, *(p.detach() for p in parameters))
    want = deepcopy(model).double()(x.double())
    torch.testing.assert_close(
        got.double(), want, rtol={BF16: 2e-2}.get(dtype, 1e-5), atol={BF16: 2e-2}.get(dtype, 1e-6)
    )


def sizes_like(f: Found, rng: random.Random) -> Iterator[Case]:
    """The case at its own size, and at others that the same kernel takes."""
    case = f.case
    yield case
    constant = case.ceil_mode or (f.group.box is not None and 1 in f.group.conv.shape[2:])
    for more in () if constant else (1, 6):  # some numbers of windows are constants of the graph
        yield replace(case, sizes=tuple(n + rng.randint(more, more + 4) for n in case.sizes), batch=rng.randint(1, 4))


def assert_random(seed: int) -> int:
    """A random group's kernel is right at several sizes; how many were tried."""
    rng = random.Random(seed)
    boxed = seed % 4 == 0
    while True:
        case = (draw_boxed if boxed else draw)(rng)
        if case.transposed and case.pool and rng.random() < 0.5:
            case = replace(case, step=tuple(rng.randint(1, 4) for _ in case.step))
        try:
            f = find(case, boxed)
        except fusewright.CaptureError:  # no window fits
            continue
        if isinstance(f, Found) and (f.group.box is not None) == boxed:
            break
    run = launcher(kernel(f, rng.choice(ways(f, case.batch))))
    tried = list(sizes_like(f, rng))
    for other in tried:
        assert_right(replace(f, case=other), run, other.example(seed), boxed)
    return len(tried)


@pytest.mark.parametrize("seed", range(14))
@pytest.mark.sampled
def test_random_groups(seed: int) -> None:
    assert_random(seed)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_many_random_groups(block: int) -> None:
    assert sum(assert_random(seed) for seed in range(100 + 22 * block, 122 + 22 * block)) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("name", [*CASES, *BOXED])
def test_every_way_to_cut(name: str) -> None:
    boxed = name in BOXED
    f = found((BOXED if boxed else CASES)[name], boxed)
    for strips in ways(f):
        for vectors, parts in ((strips.vectors, 1), (1, 2), (3, 2)):
            cut = replace(strips, strip=(1, 2, 3), vectors=vectors, parts=1 if f.group.fold else parts, chunk=2)
            assert_right(f, launcher(kernel(f, cut)), f.case.example(), boxed)


@pytest.mark.parametrize("name", ["plain", "windows, then all", "float64"])
def test_takes_any_tensor(name: str) -> None:
    """Permuted, expanded, channels-last and unaligned inputs; results do not depend on how values lie in memory."""
    f = found(CASES[name])
    run, x = launcher(kernel(f, ways(f)[0])), CASES[name].example()
    expanded = x[:1, :, :, :1].expand_as(x)
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape).copy_(x)
    forms = (x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0), x.to(memory_format=torch.channels_last), unaligned)
    assert unaligned.data_ptr() % 16
    for form in (*forms, expanded):
        assert_right(f, run, form)
    assert all(torch.equal(run(*f.tensors(form)), run(*f.tensors(x))) for form in forms)


@pytest.mark.parametrize("name", ["plain", "windows, then all", "grouped", "over channels", "flat"])
def test_empty_batch(name: str) -> None:
    f = found(CASES[name])
    x = CASES[name].example()[:0]
    got = launcher(kernel(f, ways(f)[0]))(*f.tensors(x))
    with torch.no_grad():
        want = f.model(x)
    assert got.shape == want.shape and got.numel() == 0


@pytest.mark.parametrize("name", ["windows, then all", "logsumexp", "flat", "over channels of groups", "stem"])
@pytest.mark.sampled
def test_threads_do_not_change_bits(name: str) -> None:
    case = replace(CASES[name], batch=7)
    f = found(case)
    run = launcher(kernel(f, replace(ways(f, 7)[0], parts=1)))
    tensors, before = f.tensors(case.example()), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results += [run(*tensors), run(*tensors)]
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(r, results[0]) for r in results)


@pytest.mark.parametrize("value", [nan, inf, -inf])
def test_values_that_are_not_finite_reach_what_they_reach(value: float) -> None:
    f = found(CASES["padded"])
    x = CASES["padded"].example()
    x[1, 2, 3, 4] = value
    got = launcher(kernel(f, ways(f)[0]))(*f.tensors(x))
    want, _ = f.reference(x)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
@pytest.mark.parametrize("case", [
    Case((20, 22), 96, 40, before=("relu",), pool="max", window=(2, 2), step=(2, 2)),
    Case((30, 30), 8, 64, pool="avg", window=(4, 4), step=(4, 4), fold="sum", fold_dims="cp"),
    Case((7, 7), 320, 64, (1, 1), before=("hardswish",), fold="mean", fold_dims="p"),
    Case((9, 9), 512, 16, (3, 3)),
], ids=["many channels", "box", "head", "long chains"])  # fmt: skip
@pytest.mark.sampled
def test_is_as_accurate_as_eager(case: Case, mean: float) -> None:
    boxed = case.pool == "avg"
    f = found(case, boxed)
    torch.manual_seed(0)
    x = torch.randn(2, case.channels, *case.sizes) + mean
    want = f.reference(x)[0]
    with torch.no_grad():
        eager = f.model(x)
    got = launcher(kernel(f, ways(f)[0]))(*f.tensors(x))
    allowed = max(2 * _rmse(eager, want), 1e-6 * want.square().mean().sqrt().item())
    assert _rmse(got, want) <= allowed, (_rmse(got, want), _rmse(eager, want))


@pytest.mark.parametrize(
    ("channels", "features", "taps", "along"), [(6, 2, 3, True), (6, 2, 1, False), (6, 8, 3, False)]
)
def test_small_groups_lie_along_the_lanes(channels: int, features: int, taps: int, along: bool) -> None:
    """Where several taps share what is staged for them."""
    f = found(Case((9, 9), channels, features, (taps, taps), groups=8))
    assert is_channelwise(f.group) == along
    assert ("channel_of" in kernel(f, ways(f)[0]).source) == along


def test_rows_share_the_weights_of_a_chunk() -> None:
    """Where there are several chunks, and rows are short."""
    bands = []
    for name in ("plain", "chunks over bands", "chunks over planes"):
        f = found(CASES[name])
        text = kernel(f, ways(f, batch=16)[0]).source
        bands.append([int(n) for n in re.findall(r"BAND_[DH] = (\d+)", text)])
    assert bands[0] == [1, 1] and bands[1][1] > 1 and bands[2][0] > 1


def test_taps_outside_of_the_image_are_left_out() -> None:
    """So that an infinite weight there makes no NaN of the zeros around the image."""
    f = found(Case((6, 9), 3, 20, (3, 1), padding=(1, 0)))
    x, weight, bias = f.tensors(torch.rand(f.case.example().shape) + 1)
    weight = weight.detach().clone()
    weight[:, :, 0] = inf
    got = launcher(kernel(f, ways(f)[0]))(x, weight, bias)
    assert got[:, :, 0].isfinite().all() and (got[:, :, 1:] == inf).all()


class Computed(nn.Module):
    """Divides by a function of a parameter, which is computed ahead."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.q = nn.Conv2d(3, 20, 3), nn.Parameter(torch.randn(20, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (F.celu(self.conv(x)) / (self.q.square() + 1)).relu()


def test_operands_that_are_computed() -> None:
    model, x = Computed().eval(), torch.randn(2, 3, 9, 11)
    graph = capture(model, (x,), {}).graph
    c = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(c, contraction.Contraction) and isinstance(c.operands[0].op, ops.Pointwise)
    run = launcher(cpu.kernel(c, candidates(c, (1, 7, 9), 2)[0], "fused_test", "def reference(*operands): ..."))
    with torch.no_grad():
        got = run(x, model.conv.weight, model.conv.bias, model.q.square() + 1)
        torch.testing.assert_close(got, model(x), rtol=1e-5, atol=1e-5)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(16, 200, 1), nn.Linear(200, 300)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.hardswish(self.conv(x)).mean((2, 3))).softmax(1)


def test_large_products_per_sample_are_left_to_the_library() -> None:
    """The group then ends in front of them."""
    x = torch.randn(3, 16, 7, 7)
    model = Head().eval()
    plan = fusewright.explain(fusewright.optimize(model, (x,), kernels="always", rewrite="never", verify=False))
    assert [c.name for c in plan.kernels if c.family == "contraction"] == ["fused_conv_hardswish_mean"]
    assert all(c.path == "generated" for c in plan.kernels if c.family == "contraction")


GOLDENS = {
    "logsumexp": (
        Case((31, 25), 3, 40, (2, 6), before=("tanh",), fold="logsumexp", fold_dims="c"),
        Strips((1, 8, 20), 3, 2, 3),
    ),
    "depthwise": (
        Case((56, 56), 1, 1, (3, 3), padding=(1, 1), groups=96, before=("hardswish",), fold="mean", fold_dims="p"),
        Strips((1, 14, 56), 3, 3, 1),
    ),
    "windows": (
        Case((16, 64, 64), 8, 16, (3, 3, 3), (1, 1, 1), (0, 0, 0), (1, 1, 1), pool="max", window=(2, 2, 2),
             step=(2, 2, 2), after=("divide",), fold="mean", fold_dims="p"),
        Strips((1, 8, 31), 1, 3, 8),
    ),
    "box": (
        Case((384, 384), 8, 64, pool="avg", window=(4, 4), step=(4, 4), after=("sigmoid",), fold="sum", fold_dims="cp"),
        Strips((1, 8, 95), 4, 3, 8),
    ),
    "transposed": (
        Case((32, 32), 16, 24, (3, 3), (2, 2), (1, 1), transposed=True, output_padding=(1, 1), before=("relu",)),
        Strips((1, 8, 64), 2, 1, 16),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDENS)
def test_reads_as_it_did(name: str) -> None:
    """Golden texts: a change of the generator shows as a difference of these files."""
    case, strips = GOLDENS[name]
    text = kernel(found(case, name == "box"), strips).source
    path = GOLDEN / f"cpu_contraction_{name}.cpp"
    assert text == path.read_text(), f"write the text to {path} if it is meant to change"


def _rmse(got: Tensor, want: Tensor) -> float:
    return (got.double() - want).square().mean().sqrt().item()
