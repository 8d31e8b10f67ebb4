"""Kernels as PyTorch operators.  On a CPU the reference runs, so everything but the launch is tested without a GPU."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import pytest
import torch
from fake_driver import HEADER, FakeDriver, blend, rows
from test_launch import expected, quickest
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fusewright.errors import FusewrightError
from fusewright.kernel import Array, Kernel
from fusewright.runtime import cache, operators
from fusewright.runtime.launch import Launcher
from fusewright.runtime.operators import operator


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path_factory.getbasetemp() / "kernels"))


def operands(
    n: int = 5, c: int = 3, *, grad: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(n)
    x, w = torch.randn(n, c, generator=generator, dtype=dtype), torch.randn(c, generator=generator, dtype=dtype)
    return x.requires_grad_(grad), w.requires_grad_(grad)


def with_reference(body: str, **changes: object) -> Kernel:
    return blend(reference=f"{HEADER}def reference(x, w):\n    return {body}\n", **changes)


def registered() -> int:
    return len([name for name in torch._C._dispatch_get_all_op_names() if name.startswith("fusewright::")])


# -- registration --------------------------------------------------------------------------------------------------


def test_named_after_kernel_and_content() -> None:
    overload = operator(blend()).overload
    namespace, _, name = overload.name().partition("::")  # type: ignore[attr-defined]
    assert namespace == "fusewright"
    assert name.startswith("fused_blend_") and len(name) == len("fused_blend_") + 8
    assert str(overload._schema).endswith("(Tensor x, Tensor w) -> Tensor")  # type: ignore[attr-defined]


def test_registered_once() -> None:
    first = operator(blend())
    before = registered()
    assert operator(blend()) is first
    assert operator(blend(notes=("another plan says so",))) is first
    assert registered() == before
    assert operator(blend(source=blend().source + "\n")) is not first
    assert registered() == before + 1


def test_registered_once_by_many_threads() -> None:
    kernel = blend(name="fused_by_threads")
    barrier = threading.Barrier(8)

    def work(_: int) -> int:
        barrier.wait()
        return id(operator(kernel))

    before = registered()
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(work, range(8)))) == 1
    assert registered() == before + 1


def test_copies_are_the_same_operator() -> None:
    found = operator(blend())
    assert pickle.loads(pickle.dumps(found)) is found
    assert copy.deepcopy(found) is found


# -- what it computes on a CPU ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", ["torch.tanh(x) * w * w", "x", "x.t()", "x[:, :1].expand(-1, 3)", "F.relu(x.t()).t()"])
def test_a_contiguous_value_of_its_own(body: str) -> None:
    x, w = operands()
    result = operator(with_reference(body))(x, w)
    torch.testing.assert_close(result, eval(body, {"torch": torch, "F": torch.nn.functional, "x": x, "w": w}))
    assert result.is_contiguous()
    assert not torch._C._is_alias_of(result, x)  # type: ignore[attr-defined]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    "kernel", [blend(), rows(), with_reference("(x + w).t()", output=Array("z", ("C", "N"), torch.float32))]
)
def test_opcheck(kernel: Kernel, grad: bool) -> None:
    given = operands(grad=grad, dtype=torch.float64 if kernel.name == "fused_square_sum" else torch.float32)
    tests = torch.library.opcheck(operator(kernel).overload, given[: len(kernel.operands)])
    assert len(tests) == 4 and set(tests.values()) == {"SUCCESS"}


BESIDE = Array("beside", ("C", "N"), torch.float32)
BOTH = "(torch.tanh(x) * w, (x + w).t())"


def both(**changes: object) -> Kernel:
    """Of two results."""
    return with_reference(BOTH, name="fused_both", also=(BESIDE,), **changes)


class TestSeveralResults:
    def test_a_contiguous_value_of_its_own_each(self) -> None:
        x, w = operands()
        first, second = operator(both())(x, w)
        torch.testing.assert_close((first, second), (torch.tanh(x) * w, (x + w).t()))
        assert first.is_contiguous() and second.is_contiguous()
        twice = operator(with_reference("(x, x)", also=(Array("beside", ("N", "C"), torch.float32),)))(x, w)
        assert len({t.data_ptr() for t in (x, *twice)}) == 3

    @pytest.mark.parametrize("grad", [False, True])
    def test_opcheck(self, grad: bool) -> None:
        run = operator(both())
        assert str(run.overload._schema).endswith("(Tensor x, Tensor w) -> (Tensor, Tensor)")  # type: ignore[attr-defined]
        tests = torch.library.opcheck(run.overload, operands(grad=grad))
        assert len(tests) == 4 and set(tests.values()) == {"SUCCESS"}

    def test_derivatives(self) -> None:
        run, given = operator(both()), operands(grad=True, dtype=torch.float64)
        assert torch.autograd.gradcheck(run, given) and torch.autograd.gradgradcheck(run, given)
        for i in range(2):  # of one of them alone
            assert torch.autograd.gradcheck(lambda x, w, i=i: run(x, w)[i], given)

    def test_one_that_has_no_gradient(self) -> None:
        run = operator(with_reference("(x * w, torch.ones_like(x))", also=(Array("one", ("N", "C"), torch.float32),)))
        x, w = operands(grad=True)
        first, second = run(x, w)
        (first + second).sum().backward()
        torch.testing.assert_close(x.grad, w.expand_as(x))

    def test_function_transforms(self) -> None:
        run = operator(both())
        x, w = operands(dtype=torch.float64)

        def eager(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return torch.tanh(x) * w, (x + w).mT

        for transform in (
            lambda f: torch.func.jacrev(lambda x: f(x, w))(x),
            lambda f: torch.func.jvp(lambda x: f(x, w), (x,), (torch.ones_like(x),)),
            lambda f: torch.vmap(lambda v: f(x, v), 0)(w[None] * 2),
        ):
            torch.testing.assert_close(transform(run), transform(eager))

    def test_traced(self) -> None:
        run = operator(both())
        x, w = operands(grad=True)
        compiled = torch.compile(lambda x, w: sum(t.sum() for t in run(x, w)), backend="aot_eager", fullgraph=True)
        ours, theirs = (
            torch.autograd.grad(f(x, w), (x, w)) for f in (compiled, lambda x, w: sum(t.sum() for t in run(x, w)))
        )
        torch.testing.assert_close(ours, theirs)


def test_symbolic_sizes() -> None:
    """One graph for all sizes, with every function an expression may use."""
    kernel = with_reference(
        "torch.zeros(-(-x.shape[0] // 4) + min(x.shape[1], 9), max(2, x.shape[1])) + w[0]",
        output=Array("z", ("ceil_div(N, 4) + min(C, 9)", "max(2, C)"), torch.float32),
    )
    run = operator(kernel)
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda x, w: run(x, w) + 1, backend=backend, dynamic=True, fullgraph=True)
    for n, c in [(5, 3), (6, 4), (13, 7)]:
        x, w = operands(n, c)
        torch.testing.assert_close(compiled(x, w), run(x, w) + 1)
    assert len(graphs) == 1
    assert [str(node.target) for node in graphs[0].graph.nodes if "fusewright" in str(node.target)]
    with torch._subclasses.FakeTensorMode(), torch.device("cuda"):
        fake = run(torch.empty(5, 3), torch.empty(3))
        assert fake.shape == (5, 3) and fake.device.type == "cuda"


def test_the_callable_is_traced_whole() -> None:
    run = operator(blend())
    x, w = operands(grad=True)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    result = compiled(x, w)
    torch.testing.assert_close(result, expected(x, w))
    ours = torch.autograd.grad(result.sum(), (x, w))
    torch.testing.assert_close(ours, torch.autograd.grad(expected(x, w).sum(), (x, w)))
    program = torch.export.export(Call(run), operands())
    assert "torch.ops.fusewright.fused_blend_" in program.graph_module.code


class Call(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.run(x, w)


# -- gradients -----------------------------------------------------------------------------------------------------


def test_first_and_second_derivatives() -> None:
    run = operator(blend())
    given = operands(grad=True, dtype=torch.float64)
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_only_what_is_asked_for() -> None:
    run = operator(blend())
    x, w = operands()
    result = run(x, w.requires_grad_())
    result.sum().backward()
    assert x.grad is None
    assert w.grad is not None
    assert not run(x, w.detach()).requires_grad
    with torch.no_grad():
        assert not run(x, w).requires_grad


def test_an_operand_the_value_does_not_depend_on() -> None:
    x, w = operands(grad=True)
    operator(with_reference("x * 2"))(x, w).sum().backward()
    assert w.grad is None or not w.grad.any()
    x, w = operands(grad=True)
    operator(with_reference("torch.ones_like(x)"))(x, w).sum().backward()
    assert x.grad is None or not x.grad.any()


@pytest.mark.parametrize("twice", [False, True])
def test_operands_computed_from_one_another(twice: bool) -> None:
    """Each path through them counts once."""
    run = operator(blend())

    def gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        x, _ = operands(grad=True, dtype=torch.float64)
        (grad,) = torch.autograd.grad(function(x, x.sum(0)).sum(), x, create_graph=twice)
        return torch.autograd.grad(grad.square().sum(), x)[0] if twice else grad

    torch.testing.assert_close(gradient(run), gradient(expected))


def test_operands_lie_as_they_did() -> None:
    """Strides of sizes of 1 as well: else this gradient is a wrong one of ATen's."""
    body = "torch.nn.functional.batch_norm(x, None, None, w, None, True)"
    run = operator(with_reference(body, layouts=("channels_last", "contiguous")))
    x, w, given = torch.randn(1, 8, 5, 2), torch.randn(8), torch.randn(1, 8, 5, 2)

    def gradient(function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        image = x.to(memory_format=torch.channels_last).requires_grad_()
        return torch.autograd.grad(function(image, w), image, given)[0]

    want = gradient(lambda x, w: torch.nn.functional.batch_norm(x, None, None, w, None, True))
    torch.testing.assert_close(gradient(run), want)


def test_only_operands_are_kept() -> None:
    x, w = operands(grad=True)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        operator(blend())(x, w)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), w.data_ptr()}


def test_an_operand_edited_in_between_is_noticed() -> None:
    x, w = operands(grad=True)
    moved = x * 1
    result = operator(blend())(moved, w)
    moved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_function_transforms() -> None:
    run = operator(blend())
    x, w = operands(dtype=torch.float64)
    for transform in (
        lambda f: torch.func.grad(lambda x: f(x, w).sum())(x),
        lambda f: torch.func.hessian(lambda w: f(x, w).sum())(w),
        lambda f: torch.func.jvp(lambda x: f(x, w), (x,), (torch.ones_like(x),)),
        lambda f: torch.vmap(lambda row, v: f(row[None], v), (0, None))(x, w),
        lambda f: torch.vmap(torch.func.grad(lambda row, v: f(row[None], v).sum()), (0, None))(x, w),
        lambda f: torch.func.jacrev(lambda x: f(x, w))(x),
    ):
        torch.testing.assert_close(transform(run), transform(expected))


def test_forward_mode() -> None:
    x, w = operands()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        ours, theirs = (torch.autograd.forward_ad.unpack_dual(f(dual, w)) for f in (operator(blend()), expected))
    torch.testing.assert_close(ours.tangent, theirs.tangent)


# -- the short way ---------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> tuple[operators.Operator, FakeDriver]:
    """An operator that takes CPU tensors for a GPU's, launching on a driver that runs there."""
    fake, run = FakeDriver(), operator(blend(name="fused_short"))
    monkeypatch.setattr(run, "launch", Launcher(blend(), fake))
    monkeypatch.setattr(run, "_on_target", attrgetter("is_cpu"))
    return run, fake


def test_plain_calls_launch_directly(short: tuple[operators.Operator, FakeDriver]) -> None:
    run, fake = short
    x, w = operands()
    torch.testing.assert_close(run(x, w), expected(x, w))
    assert len(fake.launches) == 1
    with torch.no_grad():
        run(x, nn.Parameter(w))
    with torch.inference_mode():
        run(x, w)
    assert len(fake.launches) == 3


def test_gradients_around_a_launch(short: tuple[operators.Operator, FakeDriver]) -> None:
    run, fake = short
    x, w = operands(grad=True)
    ours = torch.autograd.grad(run(x, w).square().sum(), (x, w))
    assert len(fake.launches) == 1
    torch.testing.assert_close(ours, torch.autograd.grad(expected(x, w).square().sum(), (x, w)))


@pytest.mark.parametrize("grad", [False, True])
def test_more_than_a_kernel_counts(grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake, kernel = FakeDriver(), blend(name="fused_counted", counts=("N * 536870912",))
    run = operator(kernel)
    monkeypatch.setattr(run, "launch", Launcher(kernel, fake))
    monkeypatch.setattr(run, "_on_target", attrgetter("is_cpu"))
    for n, launches in ((3, 1), (4, 1)):
        x, w = operands(n, grad=grad)
        y = run(x, w)
        assert y.requires_grad == grad and len(fake.launches) == launches
        torch.testing.assert_close(y, expected(x, w))


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func: object, types: object, args: tuple = (), kwargs: dict | None = None) -> object:  # type: ignore[type-arg]
        names.append(str(func))
        return func(*args, **(kwargs or {}))  # type: ignore[operator]


names: list[str] = []


class Subclass(Tensor):
    pass


def test_whoever_watches_sees_the_operator(short: tuple[operators.Operator, FakeDriver]) -> None:
    run, fake = short
    x, w = operands()
    names.clear()
    with Seen():
        run(x, w)
    assert any("fused_short" in name for name in names)
    assert type(run(x.as_subclass(Subclass), w)) is Subclass
    imaginary = torch.complex(torch.zeros_like(x), -x).conj().imag
    assert imaginary.is_neg()
    torch.testing.assert_close(run(imaginary, w), expected(x, w))
    torch.func.grad(lambda x: run(x, w).sum())(x)
    traced = torch.jit.trace(Call(run), (x, w), check_trace=False)
    assert "fused_short" in str(traced.graph)
    assert not fake.launches


# -- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
class TestGpu:
    def given(self, *, grad: bool = False) -> tuple[Tensor, Tensor]:
        x, w = (t.cuda().requires_grad_(grad) for t in operands(33, 5))
        return x, w

    def test_both_ways_run_the_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        run = operator(with_reference("1 / 0", name="fused_gpu"))  # the reference would fail
        x, w = self.given()
        torch.testing.assert_close(run(x, w), expected(x, w))
        torch.testing.assert_close(run.overload(x, w), expected(x, w))

    @pytest.mark.parametrize("grad", [False, True])
    def test_opcheck(self, grad: bool) -> None:
        tests = torch.library.opcheck(operator(blend()).overload, self.given(grad=grad))
        assert set(tests.values()) == {"SUCCESS"}

    def test_gradients(self) -> None:
        run = operator(blend())
        x, w = self.given(grad=True)
        for call in (run, run.overload):
            ours = torch.autograd.grad(call(x, w).square().sum(), (x, w))
            torch.testing.assert_close(ours, torch.autograd.grad(expected(x, w).square().sum(), (x, w)))

    def test_inductor(self) -> None:
        run = operator(blend())
        x, w = self.given()
        compiled = torch.compile(lambda x, w: run(x + 1, w) * 2, fullgraph=True)
        torch.testing.assert_close(compiled(x, w), expected(x + 1, w) * 2)

    def test_wrong_dtype(self) -> None:
        x, w = self.given()
        for call in (operator(blend()), operator(blend()).overload):
            with pytest.raises(FusewrightError, match=r"for torch.float32 w, not torch.float64"):
                call(x, w.double())

    def test_overhead(self, capsys: pytest.CaptureFixture[str]) -> None:
        run = operator(blend())
        (x, w), (gx, gw) = self.given(), self.given(grad=True)
        calls: dict[str, Callable[[], object]] = {
            "short way": lambda: run(x, w),
            "operator": lambda: run.overload(x, w),
            "with gradients": lambda: run(gx, gw),
            "x * w": lambda: x * w,
            "x * w with gradients": lambda: gx * gw,
        }
        times = dict(zip(calls, quickest(*calls.values()), strict=True))
        with capsys.disabled():
            print("\n" + ", ".join(f"{name} {time:.2f} us" for name, time in times.items()))
        assert times["short way"] - times["x * w"] <= 6.0
