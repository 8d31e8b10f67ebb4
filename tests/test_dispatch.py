"""Which calls a program serves, how often is planned, and what the rest of PyTorch makes of the drop-in."""

from __future__ import annotations

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import sympy
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.overrides import BaseTorchFunctionMode
from torch.utils.checkpoint import checkpoint

import fusewright.optimizer
from fusewright import dispatch, pipeline
from fusewright.dispatch import MOST_STATES, Entry, Guard, Options, Runner, State, guard_of
from fusewright.ir.node import Symbol
from fusewright.module import state_of
from fusewright.runtime.operators import Operator
from tests.dropin import Gap, Linear, fast, images, program_calls, same


@pytest.fixture
def model() -> Gap:
    torch.manual_seed(0)
    return Gap()


def state(module: nn.Module) -> State:
    found = state_of(module)
    assert found is not None
    return found


class TestGuard:
    B = sympy.Symbol("B", integer=True, positive=True)
    guard = Guard(2, ((B, 3), (2 * B,)), ((torch.float32, torch.device("cpu")),) * 2, {B: Symbol(0, 0, 2, 8)})

    @pytest.mark.parametrize("batch, admitted", [(1, False), (2, True), (8, True), (9, False)])
    def test_range(self, batch: int, admitted: bool) -> None:
        assert self.guard.admits(2, (torch.ones(batch, 3), torch.ones(2 * batch))) == admitted

    @pytest.mark.parametrize(
        "tensors",
        [
            (torch.ones(4, 3), torch.ones(7)),
            (torch.ones(4, 4), torch.ones(8)),
            (torch.ones(4, 3, 1), torch.ones(8)),
            (torch.ones(4, 3, dtype=torch.float64), torch.ones(8)),
            (torch.ones(4, 3), torch.ones(8, device="meta")),
        ],
    )
    def test_refuses_what_differs(self, tensors: tuple[torch.Tensor, ...]) -> None:
        assert not self.guard.admits(2, tensors)

    def test_refuses_another_layout(self) -> None:
        assert not self.guard.admits("other", (torch.ones(4, 3), torch.ones(8)))

    @pytest.mark.parametrize(
        ("x", "same_order"),
        [
            (torch.ones(4, 3, 5), True),
            (torch.ones(4, 3, 10)[..., ::2], True),
            (torch.ones(4, 1, 5).expand(4, 3, 5), True),
            (torch.ones(4, 5, 3).mT, False),
            (torch.ones(3, 4, 5).transpose(0, 1), False),
        ],
    )
    def test_order_in_memory(self, x: torch.Tensor, same_order: bool) -> None:
        """Gaps and repetitions are no other order; what has no kernels takes any."""
        for ordered in (False, True):
            guard = guard_of((torch.ones(4, 3, 5),), {}, ((4, 3, 5),), {}, ordered=ordered)
            assert guard.admits(1, (x,)) == (same_order or not ordered)
        assert guard_of((x,), {}, ((4, 3, 5),), {}, ordered=True).admits(1, (x.clone(),))


class Map(nn.Module):
    """A model whose answer lies in memory as its input does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x))


def test_kernels_serve_the_order_in_memory_that_they_were_made_for() -> None:
    """The same shape in another memory format runs the original, which answers in that format."""
    torch.manual_seed(0)
    model = Map().eval()
    row_major = torch.randn(2, 3, 8, 8)
    last = row_major.to(memory_format=torch.channels_last)
    for example, other in ((row_major, last), (last, row_major)):
        f = fusewright.optimize(model, (example,), kernels="always", measure=False)
        state(f).options = replace(state(f).options, replans=0)
        assert any(choice.path == "generated" for choice in fusewright.explain(f).kernels)
        for x, served in ((example, True), (other, False), (example, True)):
            before = program_calls(f)
            with torch.no_grad():
                got, want = f(x), model(x)
            torch.testing.assert_close(got, want)
            assert got.stride() == want.stride() and (program_calls(f) > before) == served


def test_kernels_ask_nothing_that_the_call_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without gradients, and with ordinary tensors alone, a program's kernels run as they are."""
    asked: list[str] = []
    call = Operator.__call__

    def watched(operator: Operator, *tensors: torch.Tensor) -> torch.Tensor:
        asked.append(operator.kernel.name)
        return call(operator, *tensors)

    monkeypatch.setattr(Operator, "__call__", watched)
    model, x = Map().eval(), torch.randn(2, 3, 8, 8)
    f = fusewright.optimize(model, (x,), kernels="always", measure=False)
    want = model(x).detach()

    def asks(x: torch.Tensor) -> bool:
        asked.clear()
        torch.testing.assert_close(f(x).detach(), want)
        return bool(asked)

    assert asks(x)  # it has parameters with gradients
    with torch.no_grad():
        assert not asks(x) and not asks(x)
        with BaseTorchFunctionMode():
            assert asks(x)
        assert not asks(x)
        negative = torch.complex(torch.zeros_like(x), -x).conj().imag
        assert negative.is_neg() and asks(negative)
        with torch.autograd.forward_ad.dual_level():
            assert asks(x)
        model.conv.bias = nn.Parameter(model.conv.bias.clone())  # another state, to be judged again
        assert asks(x) is False
        model.conv.bias = nn.Parameter(torch._neg_view(-model.conv.bias))
        assert model.conv.bias.is_neg() and asks(x)


class Eager(nn.Module):
    """A convolution that other shapes of its weight suit as well."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.scale = 2.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.conv(x)) * self.scale


CHANGES: dict[str, Callable[[Eager], object]] = {
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "a parameter": lambda m: setattr(m.conv, "bias", nn.Parameter(torch.ones(4))),
    "a shape": lambda m: setattr(m, "conv", nn.Conv2d(3, 5, 3)),
    "nothing that is left": lambda m: delattr(m.conv, "weight"),
    "a hook": lambda m: m.conv.register_forward_hook(lambda module, inputs, output: output + 1),
    "the mode": lambda m: m.train(),
}


def goes_ahead(monkeypatch: pytest.MonkeyPatch) -> tuple[Eager, nn.Module, torch.Tensor, list[str]]:
    """A model, its replacement, and what that asked in turn: whether the module is unchanged, and its program."""
    torch.manual_seed(0)
    model, x = Eager().eval(), torch.randn(2, 3, 8, 8)
    f = fusewright.optimize(model, (x,), kernels="always", measure=False)
    steps: list[str] = []
    run, unchanged = Runner.__call__, dispatch.Watch.unchanged
    monkeypatch.setattr(Runner, "__call__", lambda self, *args: steps.append("program") or run(self, *args))
    monkeypatch.setattr(dispatch.Watch, "unchanged", lambda self: steps.append("unchanged") or unchanged(self))
    for entry in state(f).entries.values():
        assert entry.runner is not None and not entry.runner.may_go_ahead  # on a CPU, which would compute meanwhile
        entry.runner.may_go_ahead = True
    return model, f, x, steps


@torch.no_grad()
def test_a_program_goes_ahead_of_the_question_whether_its_module_is_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, x, steps = goes_ahead(monkeypatch)
    want = model(x)
    for expected in (["unchanged", "program"], ["program", "unchanged"], ["program", "unchanged"]):
        steps.clear()
        torch.testing.assert_close(f(x), want)
        assert steps == expected
    steps.clear()
    torch.testing.assert_close(f(torch.cat([x, x])), torch.cat([want, want]))  # another call than the last one
    assert steps == ["unchanged", "program"]
    steps.clear()
    with torch.enable_grad():
        f(x)
    assert steps[0] == "unchanged"


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_what_went_ahead_is_dropped_where_the_module_has_changed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, x, steps = goes_ahead(monkeypatch)
    f(x), f(x)
    steps.clear()
    CHANGES[change](model)
    try:
        want = model(x)
    except AttributeError:
        with pytest.raises(AttributeError):
            f(x)
        return
    torch.testing.assert_close(f(x), want)
    assert steps[:2] == ["program", "unchanged"]


@torch.no_grad()
def test_what_a_module_no_longer_holds_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, x, _ = goes_ahead(monkeypatch)
    f(x), f(x)
    old = weakref.ref(model.conv.weight)
    model.load_state_dict({key: value.double() for key, value in model.state_dict().items()}, assign=True)
    for _ in range(3):
        f(x.double())
    gc.collect()
    assert old() is None


class Calling(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_what_may_do_harm_does_not_go_ahead() -> None:
    """Random numbers would be others next, and a row that is not there stops a GPU for good."""
    gpu = replace(TestGuard.guard, kinds=((torch.float32, torch.device("cuda")),))

    def may(model: nn.Module, x: torch.Tensor) -> bool:
        return Runner(pipeline.build(model, (x,), {}).program, gpu).may_go_ahead

    x = torch.randn(2, 3)
    assert may(nn.Linear(3, 3), x) and not may(nn.Dropout(), x)
    assert not may(nn.Embedding(3, 3), torch.tensor([0, 1]))
    assert may(Calling(lambda x: F.scaled_dot_product_attention(x, x, x)), torch.randn(2, 3, 4))
    assert not may(Calling(lambda i: torch.gather(torch.ones(3), 0, i)), torch.tensor([0, 1]))
    assert not may(Calling(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)), torch.randn(2, 3, 4))


@torch.no_grad()
def test_what_fails_without_a_change_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    _, f, x, _ = goes_ahead(monkeypatch)
    f(x)

    def fails(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(Runner, "__call__", fails)
    with pytest.raises(MemoryError):
        f(x)


class TestPlanning:
    def test_first_call_of_a_kind_runs_the_original(self, model: Gap) -> None:
        f = fast(model)
        for program in (False, True, True):
            same(f, model, images(side=9), program=None if program else False)
        assert state(f).replans == 1

    def test_is_bounded(self, model: Gap) -> None:
        f = fast(model)
        state(f).options = replace(state(f).options, replans=2)
        for side in (5, 6, 7, 8):
            for _ in range(3):
                same(f, model, images(side=side))
        assert state(f).replans == 2
        same(f, model, images(side=8), program=False)

    def test_states_are_bounded(self, model: Gap) -> None:
        f = fast(model)
        state(f).options = replace(state(f).options, replans=0)
        for i in range(MOST_STATES + 5):
            model.divisor = 10.0 + i
            same(f, model, images(), program=False)
        assert len(state(f)._epochs) == MOST_STATES
        model.divisor = 2.0
        same(f, model, images(), program=True)

    def test_an_address_used_again_is_no_old_state(self, model: Gap) -> None:
        f = fast(model)
        for _ in range(20):  # a new function tends to get its predecessor's address
            model.extra = lambda x: x
            same(f, model, images(), program=False)
            del model.extra

    def test_failure_of_a_plan_is_no_failure_of_the_call(self, model: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
        f = fast(model)

        def failing(*_: object) -> None:
            raise AssertionError("a fault of ours")

        monkeypatch.setattr(fusewright.optimizer, "tried", failing)
        same(f, model, images(side=9))
        with pytest.warns(RuntimeWarning, match="a fault of ours"):
            same(f, model, images(side=9), program=False)
        same(f, model, images(side=9), program=False)

    def test_options_follow(self, model: Gap) -> None:
        f = fast(model, finite=True, precision="fp32")
        assert state(f).options == Options(None, "fp32", "always", "auto", True, False, False)

    def test_verified_before_it_is_used(self, model: Gap) -> None:
        f = fast(model, verify=True)
        for _ in range(2):
            same(f, model, images(2, side=7))
        plan = state(f).latest_plan()
        assert plan is not None and plan.verdict is not None and plan.verdict.ok
        assert "7, 7" in plan.signature

    def test_calls_with_gradients_that_are_slower_are_examined_once(
        self, model: Gap, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        f = fast(model)
        known = state(f)
        known.entries = {key: replace(entry, modes=frozenset({"forward"})) for key, entry in known.entries.items()}
        examined: list[None] = []
        unchanged = dispatch.Watch.unchanged

        def examining(watch: dispatch.Watch) -> bool:
            examined.append(None)
            return unchanged(watch)

        monkeypatch.setattr(dispatch.Watch, "unchanged", examining)

        def examinations(call: Callable[[], object]) -> int:
            examined.clear()
            call()
            return len(examined)

        x = images()
        assert [examinations(lambda: same(f, model, x, program=False)) for _ in range(3)] == [1, 0, 0]
        assert examinations(lambda: same(f, model, x.requires_grad_(), program=False)) == 1  # the input's gradient, too
        assert examinations(lambda: same(f, model, images(3), program=False)) == 1  # another shape
        assert examinations(lambda: same(f, model, images(3), program=False)) == 0
        with torch.no_grad():
            assert examinations(lambda: same(f, model, images(3), program=True)) == 1
        model.train(not model.training)
        assert examinations(lambda: same(f, model, images(3))) >= 1  # the other mode
        model.divisor = 3.0  # the original serves what was changed, examined or not
        same(f, model, images(3), program=False)

    def test_integers_and_subclasses_of_tensors(self, model: Gap) -> None:
        f = fast(model)
        x = images().as_subclass(Tagged)
        for _ in range(3):
            same(f, model, x, program=False)


class Tagged(torch.Tensor):
    pass


def test_threads(model: Gap) -> None:
    f = fast(model)
    inputs = [images(batch, side) for batch in (2, 3) for side in (10, 9)]
    expected = [model(x) for x in inputs]
    faults: list[object] = []

    def work() -> None:
        try:
            for _ in range(10):
                for x, y in zip(inputs, expected, strict=True):
                    torch.testing.assert_close(f(x), y, rtol=1e-4, atol=1e-5)
        except BaseException as error:
            faults.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults and state(f).replans == 1


class TestTransforms:
    def test_functional_call(self, model: Gap) -> None:
        f, x = fast(model), images()
        other = {name: torch.randn_like(p) for name, p in model.named_parameters()}
        for _ in range(3):
            expected = functional_call(model, other, (x,))
            torch.testing.assert_close(functional_call(f, other, (x,)), expected)
        assert state(f).replans == 0
        same(f, model, x, program=True)

    def test_grad_and_vmap(self, model: Gap) -> None:
        f, x = fast(model), images()
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(module: nn.Module):
            return lambda weights, one: functional_call(module, weights, (one[None],)).square().sum()

        for _ in range(3):
            found, expected = (vmap(grad(loss(m)), (None, 0))(parameters, x) for m in (f, model))
            torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.func.jvp(f, (x,), (x,)), torch.func.jvp(model, (x,), (x,)))
        same(f, model, x, program=True)

    def test_ensemble(self, model: Gap) -> None:
        stacked, buffers = stack_module_state([model, Gap()])
        f, x = fast(model), images()
        found, expected = (
            vmap(lambda p, b, m=m: functional_call(m, (p, b), (x,)))(stacked, buffers) for m in (f, model)
        )
        torch.testing.assert_close(found, expected)

    def test_forward_mode(self, model: Gap) -> None:
        import torch.autograd.forward_ad as fwAD

        f, x, t = fast(model), images(), images()
        with fwAD.dual_level():
            found, expected = (fwAD.unpack_dual(m(fwAD.make_dual(x, t))).tangent for m in (f, model))
            torch.testing.assert_close(found, expected)

    def test_double_backward(self, model: Gap) -> None:
        results = []
        x = images(requires_grad=True)
        for module in (fast(model), model):
            (first,) = torch.autograd.grad(module(x).square().sum(), x, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), [x, *module.parameters()]))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)

    def test_checkpoint(self, model: Gap) -> None:
        f, x = fast(model), images(requires_grad=True)
        (found,) = torch.autograd.grad(checkpoint(f, x, use_reentrant=False).sum(), x)
        (expected,) = torch.autograd.grad(model(x).sum(), x)
        torch.testing.assert_close(found, expected)


class TestTracers:
    def test_compile(self, model: Gap) -> None:
        f, x = fast(model), images()
        compiled = torch.compile(f, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), model(x))
        assert program_calls(f) == 0

    def test_export(self, model: Gap) -> None:
        f, x = fast(model), images()
        program = torch.export.export(f, (x,))
        torch.testing.assert_close(program.module()(x), model(x))
        assert any("conv2d" in str(node.target) for node in program.graph.nodes)

    def test_trace(self, model: Gap) -> None:
        f, x = fast(model), images()
        torch.testing.assert_close(torch.jit.trace(f, (x,), check_trace=False)(x), model(x))
        assert program_calls(f) == 0

    def test_fx(self) -> None:
        model = Linear()
        f, x = fast(model, torch.randn(4, 16)), torch.randn(4, 16)
        torch.testing.assert_close(torch.fx.symbolic_trace(f)(x), model(x))

    def test_fake_tensors(self, model: Gap) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        f = fast(model)
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert f(torch.empty(4, 3, 10, 10)).shape == (4, 8)


@pytest.fixture
def group() -> Iterator[None]:
    os.environ.update(MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
class TestDistributed:
    def test_data_parallel(self, model: Gap) -> None:
        twin = copy.deepcopy(model)
        f = fast(model)
        wrapped = nn.parallel.DistributedDataParallel(f)
        for side in (10, 10, 9, 9, 9):  # the second of a new size plans within a step
            x = images(side=side)
            wrapped(x).square().mean().backward()
            twin(x).square().mean().backward()
        for a, b in zip(f.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-5)
        assert program_calls(f) >= 4 and state(f).replans == 1

    def test_sharded(self, model: Gap) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        twin = copy.deepcopy(model)
        f = fully_shard(fast(model), mesh=mesh)
        assert isinstance(f, Gap)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (f, twin)]
        for _ in range(3):
            x = images()
            for module, optimizer in zip((f, twin), optimizers, strict=True):
                optimizer.zero_grad()
                module(x).square().mean().backward()
                optimizer.step()
            with torch.no_grad():
                torch.testing.assert_close(f(x), twin(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("machine", "kept"), [(90, True), (100, False), (80, False), (None, True)])
def test_a_pickle_leaves_kernels_of_another_architecture_behind(
    monkeypatch: pytest.MonkeyPatch, machine: int | None, kept: bool
) -> None:
    """A program whose kernels are for Hopper alone, unpickled on a machine with that GPU, another one or none."""
    kernel = SimpleNamespace(target="cuda", runs_on=lambda capability: capability == 90)
    nothing = {
        "constants": {},
        "derived": (),
        "sources": {},
        "foreign": True,
        "repeatable": False,
        "looks_up": False,
        "functions": lambda: (None, None),
    }
    program = SimpleNamespace(kernels=(kernel,), **nothing)
    entry = Entry(Runner(cast("Any", program), TestGuard.guard), frozenset())
    monkeypatch.setattr(dispatch, "capability_of", lambda _: machine)
    portable = {"entries": {("key",): entry}, "options": Options(), "planner": None, "plan": None}
    assert bool(State.from_portable(nn.Identity(), portable).entries) == kept
