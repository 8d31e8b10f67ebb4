"""`torch.compile(model, backend="fusewright")`: what is served, with whose weights, and what is left alone."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing import assert_close

from fusewright import backend, trial
from fusewright.backend import Inputs, Region, Served, served
from fusewright.measure import Sample
from fusewright.module import state_of
from fusewright.runtime import cache
from tests.dropin import Normed

ALWAYS = {"rewrite": "always", "kernels": "always", "verify": False, "measure": False, "otherwise": "eager"}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Head(nn.Module):
    """A convolution, its batch norm, and a mean: one kernel on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(self.norm(self.conv(x))).mean((2, 3))).view(x.shape[0], 2, 2)


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="fusewright", options={**ALWAYS, **options})


def images(batch: int = 4) -> Tensor:
    return torch.randn(batch, 3, 12, 12)


def only(model: nn.Module) -> Served:
    (found,) = served(model)
    return found


def rewritten(model: nn.Module) -> Served:
    """The one graph of `model`, which a generated kernel serves."""
    found = only(model)
    assert found.plan is not None and found.serves and "served by fusewright" in str(found)
    assert any(kernel.path == "generated" for kernel in found.plan.kernels)
    return found


def test_pytorch_finds_it_by_its_name() -> None:
    assert "fusewright" in torch.compiler.list_backends()


def test_a_model_is_served() -> None:
    model = Head().eval()
    with torch.no_grad():
        fast, x = compiled(model), images()
        assert_close(fast(x), model(x))
        assert_close(fast(x), model(x))
    assert rewritten(model).inputs.given == (2,)


def test_by_default_it_is_verified_and_timed_beside_the_other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FASTER", 1e9)  # whatever a busy machine says
    model, x = Head().eval(), torch.randn(4, 3, 64, 64)
    with torch.no_grad():
        fast = torch.compile(model, backend="fusewright", options={"otherwise": "eager"})
        assert_close(fast(x), model(x))
    found = only(model)
    assert found.plan is not None and found.plan.verdict is not None and found.plan.verdict.ok
    assert found.seconds.keys() == {"fusewright", "eager"}
    assert found.serves == (found.seconds["fusewright"] < found.seconds["eager"])


@pytest.mark.parametrize("ours", [1.0, 3.0])
def test_the_faster_one_serves(ours: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "FASTER", 1e9)

    def compare(calls: dict[str, Any], **_: Any) -> dict[str, Sample]:
        assert_close(calls["fusewright"](), calls["eager"]())
        return {"fusewright": Sample.of([ours]), "eager": Sample.of([2.0])}

    monkeypatch.setattr(backend, "compare", compare)
    model, x = Head().eval(), images()
    with torch.no_grad():
        assert_close(compiled(model, kernels="never", measure=True)(x), model(x))
    assert only(model).serves == (ours < 2)
    assert ("served by fusewright" if ours < 2 else "served by eager") in str(only(model))


def test_inductor_has_what_is_not_rewritten() -> None:
    model, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    with torch.no_grad():
        assert_close(torch.compile(model, backend="fusewright")(x), model(x))
    found = only(model)
    assert not found.serves and found.otherwise is not found.graph.forward


def test_lengths_are_read_from_tensors() -> None:
    model = Head().eval()
    with torch.no_grad():
        fast = compiled(model)
        for batch in (4, 5, 6, 9):
            x = images(batch)
            assert_close(fast(x), model(x))
    first, dynamic = sorted(served(model), key=lambda s: len(s.inputs.lengths))
    assert not first.inputs.lengths and list(dynamic.inputs.lengths.values()) == [(0, 0)]
    assert dynamic.serves and dynamic.plan is not None and dynamic.plan.kernels


def test_a_number_that_no_tensor_has_is_an_input() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor, by: int) -> Tensor:
            return self.conv(x).sum(1) * by

    model, x = Scaled().eval(), images()
    with torch.no_grad():
        fast = compiled(model)
        for by in (2, 3, 4, 5):
            assert_close(fast(x, by), model(x, by))


def test_weights_are_read_in_every_call() -> None:
    model, x = Head().eval(), images()
    with torch.no_grad():
        fast = compiled(model)
        fast(x)
        model.conv.weight.mul_(2)
        assert_close(fast(x), model(x))
        model.load_state_dict(Head().state_dict())
        assert_close(fast(x), model(x))
    rewritten(model)


def test_layers_that_are_alike_share_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, x, planned = [Head().eval() for _ in range(3)], images(), []
    optimize = backend.optimize
    monkeypatch.setattr(
        backend, "optimize", lambda region, *a, **k: planned.append(region) or optimize(region, *a, **k)
    )
    with torch.no_grad():
        for layer in layers:
            assert_close(compiled(layer)(x), layer(x))
    assert len(planned) == 1 and len({rewritten(layer) for layer in layers}) == 1


def test_weights_beyond_what_is_remembered_have_the_other_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Head().eval(), images()
    with torch.no_grad():
        fast = compiled(model)
        fast(x)
        found = rewritten(model)
        monkeypatch.setattr(backend, "MOST_WEIGHTS", 1)
        other = Head().eval()
        args = _arguments(found, other, x)
        assert_close(found(*args)[0], other(x))
        assert len(found._by_weights) == 1
        monkeypatch.setattr(backend, "MOST_WEIGHTS", 2)
        assert_close(found(*args)[0], other(x))
        assert len(found._by_weights) == 2


def _arguments(found: Served, model: nn.Module, x: Tensor) -> list[Any]:
    """What the graph of one model takes, from another of its class."""
    names = [node.target for node in found.graph.graph.nodes if node.op == "placeholder"]
    held = {f"L_self_modules_{n.replace('.', kind)}_": t for kind, n, t in _state(model)}
    return [held.get(str(name), x) for name in names]


def _state(model: nn.Module) -> list[tuple[str, str, Tensor]]:
    parameters = [("_parameters_", name, tensor) for name, tensor in model.named_parameters()]
    return parameters + [("_buffers_", name, tensor) for name, tensor in model.named_buffers()]


def test_tensors_of_a_program_s_own_are_not_another_s_weights() -> None:
    class Tabled(Head):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * torch.tensor([1.0, 2.0])

    model, other, x = Tabled().eval(), Tabled().eval(), images()
    with torch.no_grad():
        for one in (model, other):
            fast = compiled(one)
            assert_close(fast(x), one(x))
            assert_close(fast(x), one(x))
    rewritten(model)
    assert served(model) == served(other)


def test_what_a_program_does_not_serve_the_other_compiler_does(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, calls = Head().eval(), images(), []

    def recording(name: str, graph: torch.fx.GraphModule, examples: Any) -> Any:
        return lambda *args: calls.append(name) or graph(*args)  # type: ignore[func-returns-value]

    monkeypatch.setattr(backend, "_compiled", recording)
    with torch.no_grad():
        compiled(model)(x)
        found = rewritten(model)
        args = _arguments(found, model, x)
        assert_close(found(*args)[0], model(x))
        assert not calls
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert found(*args)[0].dtype is torch.bfloat16
        assert calls == ["eager"]


def test_sizes_that_change_are_planned_anew() -> None:
    model = Head().eval()
    with torch.no_grad():
        fast = compiled(model)
        for side in (12, 14, 14, 16, 16, 16, 18, 18, 18):
            x = torch.randn(4, 3, side, side)
            assert_close(fast(x), model(x))
    (found,) = (s for s in served(model) if s.inputs.lengths)
    (program,) = found.programs
    state = state_of(program)
    assert found.serves and state is not None and len(state.entries) == 3
    assert all(entry.runner is not None for entry in state.entries.values())


def test_a_call_that_the_graph_rejects_raises_its_error() -> None:
    class Picking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 4)

        def forward(self, i: Tensor) -> Tensor:
            return self.table(i).sum(1)

    model = Picking().eval()
    with torch.no_grad():
        fast, i = compiled(model), torch.tensor([[1, 8]])
        with pytest.raises(IndexError):
            fast(i)
        assert_close(fast(i - 1), model(i - 1))
    assert only(model).plan is not None


def test_weights_are_not_kept_alive() -> None:
    model, x = Head().eval(), images()
    with torch.no_grad():
        compiled(model)(x)
    weight, found = weakref.ref(model.conv.weight), rewritten(model)
    assert len(found.programs) == 1
    del model
    gc.collect()
    assert weight() is None and not found.programs


def test_programs_are_no_part_of_a_model() -> None:
    model, x = Head().eval(), images()
    with torch.no_grad():
        compiled(model)(x)
        rewritten(model)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert_close(other(x), model(x))
            assert not any(isinstance(v, backend.Programs) for p in other.parameters() for v in vars(p).values())


def test_training_is_eager_s(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Head()
    twin, x = copy.deepcopy(model), images().requires_grad_()
    fast = compiled(model, verify=True)
    for _ in range(3):
        y = x.detach().clone().requires_grad_()
        fast(x).square().sum().backward()
        twin(y).square().sum().backward()
        assert_close(x.grad, y.grad)
        x.grad = None
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    assert_close([p.grad for p in model.parameters()], [p.grad for p in twin.parameters()])
    found = only(model)
    assert found.plan is not None and "training mode" in found.plan.signature


def test_timing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither running statistics nor the stream of random numbers."""
    monkeypatch.setattr(trial, "FASTER", 1e9)
    model = Normed()
    twin, x = copy.deepcopy(model), images()
    fast = compiled(model, kernels="never", measure=True)
    for module in (fast, twin):
        torch.manual_seed(3)
        module(x).square().sum().backward()
    assert only(model).seconds
    assert_close(dict(model.named_buffers()), dict(twin.named_buffers()))
    torch.manual_seed(3)
    found = fast(x)
    torch.manual_seed(3)
    assert_close(found, twin(x))


def test_what_cannot_be_called_twice_with_gradients_is_not_timed() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.register_buffer("seen", torch.zeros(4, 10, 10))

        def forward(self, x: Tensor) -> Tensor:
            self.seen[:1] = self.conv(x).sum(1)[:1]
            return self.seen * 2

    model = Cached()
    twin, x = copy.deepcopy(model), images()
    assert_close(compiled(model, measure=True)(x), twin(x))
    assert not only(model).seconds


def test_planning_draws_no_numbers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Dropout(), nn.ReLU())
    fast, x = compiled(model), images()
    torch.manual_seed(3)
    found = fast(x)
    torch.manual_seed(3)
    assert_close(found, model(x))


def test_a_written_input_is_written_once() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            seen.add_(1)
            return self.conv(x).sum(1) * seen

    model, x, seen = Counting().eval(), images(), torch.zeros(())
    with torch.no_grad():
        fast = compiled(model)
        for n in (1, 2):
            assert_close(fast(x, seen), model.conv(x).sum(1) * n)
            assert seen == n


def test_a_break_makes_two_graphs() -> None:
    class Broken(Head):
        def forward(self, x: Tensor) -> Tensor:
            y = self.conv(x).mean((2, 3))
            torch._dynamo.graph_break()
            return F.relu(self.last(y)).sum(1)

    model, x = Broken().eval(), images()
    with torch.no_grad():
        assert_close(compiled(model)(x), model(x))
    assert len(served(model)) == 2


@pytest.mark.parametrize("around", ["inference", "autocast", "gradients"])
def test_what_is_around_a_call(around: str) -> None:
    model, x = Head().eval(), images()
    fast = compiled(model)
    contexts: dict[str, Any] = {
        "inference": torch.inference_mode(),
        "autocast": torch.autocast("cpu", dtype=torch.bfloat16),
        "gradients": torch.enable_grad(),
    }
    with contexts[around]:
        assert_close(fast(x), model(x))
        assert_close(fast(x), model(x))


def test_functions_are_compiled_as_well() -> None:
    def loss(x: Tensor, t: Tensor) -> Tensor:
        return (F.gelu(x) - t).square().mean()

    x, t = torch.randn(64, 64), torch.randn(64, 64)
    with torch.no_grad():
        assert_close(compiled(loss)(x, t), loss(x, t))
    assert any(found.serves and not found.inputs.held for found in served())


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ({"options": {"tiles": 3}}, "has no options tiles; its options are otherwise, finite, graphs"),
        ({"options": {"otherwise": "nobody"}}, "otherwise is 'nobody', which is no backend here"),
        ({"mode": "max-autotune"}, "has no mode 'max-autotune'"),
    ],
)
def test_what_it_does_not_have_is_told(how: dict[str, Any], said: str) -> None:
    with pytest.raises(Exception, match=said):
        torch.compile(nn.Linear(2, 2), backend="fusewright", **how)(torch.ones(2, 2))


def test_where_the_other_compiler_fails_the_graph_runs_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str) -> Any:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._dynamo, "lookup_backend", failing)
    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    x = torch.ones(2, 2)
    found = backend.backend(graph, [x], options={"verify": False})
    assert found.otherwise == graph.forward
    assert_close(found(x), graph(x))


def test_what_dynamo_does_not_mark_is_an_input() -> None:
    graph = torch.fx.symbolic_trace(lambda w, x, k: x @ w * k)
    w, x, k = nn.Parameter(torch.randn(3, 3)), torch.randn(2, 3), torch.randn(3)
    inputs = Inputs.of(graph, [w, x, k])
    assert (inputs.held, inputs.given, inputs.lengths) == ((0,), (1, 2), {})
    assert_close(Region(graph, inputs, [w])(x, k), x @ w * k)
    torch._dynamo.mark_static_address(k)
    assert Inputs.of(graph, [w, x, k]).held == (0, 2)
