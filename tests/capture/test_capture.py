"""The interface: signatures, batch symbols, what is refused, and that the model stays as it was."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fusewright.capture import Captured, capture, symbols
from fusewright.errors import CaptureError
from fusewright.ir.ops import Opaque
from tests.capture.harness import Fn, assert_equal, check, opaque, program_of, resized, same


def bounds(captured: Captured) -> list[tuple[str, int, int, int, int | None]]:
    return [(str(s), p.input, p.dim, p.low, p.high) for s, p in captured.graph.symbols.items()]


def test_nested_inputs_and_outputs() -> None:
    class Nested(nn.Module):
        def forward(self, x: Any, pair: Any, *, scale: float, flag: bool, name: Any = None) -> Any:
            y = pair["a"] * scale if flag else pair["b"]
            return {"sum": x + y, "parts": [y, (x, None, 3, "text")], "size": x.shape[0], 5: pair["b"].mean()}

    x, pair = torch.randn(4, 3, requires_grad=True), {"b": torch.randn(2), "a": torch.randn(4, 3)}
    captured = check(Nested(), x, pair, batch=6, flag=True, scale=2.5)
    assert captured.positions == (0, 1, 2) and set(captured.fixed.values()) == {True, 2.5}
    assert len(set(captured.input_names)) == 3


def test_keywords_in_another_order_than_the_signature() -> None:
    check(Fn(lambda x, *, a, b: x * a - b), torch.randn(4, 3), b=torch.randn(3), a=torch.randn(3))

    class Signature(nn.Module):
        def forward(self, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: float = 1.0) -> torch.Tensor:
            return x * a - b * c

    check(Signature(), torch.randn(4, 3), c=2.0, b=torch.randn(3), a=torch.randn(3))


@pytest.mark.parametrize("name", ["torch", "F", "constants", "B"])
def test_inputs_with_names_that_programs_use(name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"def forward({name}, other): return {name}.relu() * other + {name}.shape[0]", scope)

    class Named(nn.Module):
        pass

    model = type("Named", (nn.Module,), {"forward": lambda self, x, other: scope["forward"](x, other)})()
    check(model, torch.randn(4, 3), torch.randn(4, 3), batch=3)


def test_shared_submodules_and_tied_parameters() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head, self.layer = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False), nn.Linear(5, 5)
            self.head.weight = self.embed.weight
            self.again = self.layer

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.head(self.again(self.layer(self.embed(tokens))))

    captured = check(Tied(), torch.randint(0, 7, (4, 6)), batch=2)
    assert captured.shared == (
        ("embed.weight", "head.weight"),
        ("layer.weight", "again.weight"),
        ("layer.bias", "again.bias"),
    )


RANGES: dict[str, tuple[Callable[..., Any], tuple[int, int | None] | None]] = {
    "any": (lambda x: x * 2, (2, None)),
    "lower bound": (lambda x: x + 1 if x.shape[0] > 3 else x - 1, (4, None)),
    "upper bound": (lambda x: x + 1 if x.shape[0] < 100 else x - 1, (2, 99)),
    "both": (lambda x: x + 1 if 3 < x.shape[0] < 10 else x - 1, (4, 9)),
    "excluded value": (lambda x: x + 1 if x.shape[0] != 7 else x - 1, (2, 6)),
    "product with a length": (lambda x: x + 1 if x.shape[0] * x.shape[2] > 10 else x - 1, (3, None)),
    "merged with another dimension": (lambda x: x.view(-1, 5).mean(1).view(x.shape[0], -1), (2, None)),
    "difference": (lambda x: x[1:] * x[:-1], (3, None)),
    "even": (lambda x: x + 1 if x.shape[0] % 2 == 0 else x - 1, None),
    "half": (lambda x: x[: x.shape[0] // 2] * 2, None),
    "paired": (lambda x: x.view(x.shape[0] // 2, 2, 6, 5) * 2, None),
    "one value": (lambda x: x + 1 if x.shape[0] == 4 else x - 1, None),
    "as an int": (lambda x: x * int(x.shape[0]), None),
    "as a float": (lambda x: x * (x.shape[0] * 0.5), None),
    "a power": (lambda x: x * x.shape[0] ** 0.5, None),
    "checked": (lambda x: (torch._check(x.shape[0] % 2 == 0), x + 1)[1], None),
}


@pytest.mark.parametrize("name", RANGES)
def test_the_batch_range_is_what_the_trace_holds_for(name: str) -> None:
    fn, expected = RANGES[name]
    captured = check(Fn(fn), torch.randn(4, 6, 5))
    if expected is None:
        assert captured.static and not captured.graph.symbols
        return
    assert captured.static is None and bounds(captured) == [("B", 0, 0, *expected)]
    x = torch.randn(4, 6, 5)
    for size in {expected[0], expected[1] or 9}:
        assert_equal(Fn(fn), captured, *resized(((x,), {}), 4, size))


@pytest.mark.parametrize("hidden", ["expr", "guards"])
def test_a_pytorch_that_hides_its_symbols_gives_a_static_graph(hidden: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are attributes without a promise: without them, nothing may be assumed about other batches."""
    from torch.fx.experimental import sym_node, symbolic_shapes

    captured = capture(nn.Linear(3, 2), (torch.randn(4, 3),))
    assert captured.static is None
    real = symbols.read_symbols

    def blind(*args: Any) -> Any:
        owner: Any = sym_node.SymNode if hidden == "expr" else symbolic_shapes.ShapeEnv
        if hidden == "expr":
            monkeypatch.setattr(owner, "expr", None)
        else:
            values = args[1][0].fake_mode.shape_env
            monkeypatch.delattr(values, "guards")
        return real(*args)

    monkeypatch.setattr("fusewright.capture.export.read_symbols", blind)
    captured = capture(nn.Linear(3, 2), (torch.randn(4, 3),))
    assert captured.static and "this PyTorch" in captured.static and not captured.graph.symbols


@pytest.mark.parametrize("batch", [0, 1])
def test_small_batches_are_static(batch: int) -> None:
    captured = check(nn.Linear(3, 2), torch.randn(batch, 3))
    assert not captured.graph.symbols


def test_a_fixed_batch_on_request() -> None:
    captured = capture(nn.Linear(3, 2), (torch.randn(4, 3),), dynamic_batch=False)
    assert not captured.graph.symbols and captured.static is None


def test_inputs_that_share_the_batch_share_the_symbol() -> None:
    captured = check(Fn(lambda x, y: x + y), torch.randn(4, 3), torch.randn(4, 3), batch=5)
    assert bounds(captured) == [("B", 0, 0, 2, None)]
    assert [n.shape for n in captured.graph.inputs] == [captured.graph.inputs[0].shape] * 2


@pytest.mark.parametrize("turned", [False, True])
def test_a_batch_that_may_be_no_greater_than_another_shares_its_symbol(turned: bool) -> None:
    x, index = torch.randn(4, 6), torch.randint(6, (4, 1))
    model = Fn((lambda i, x: x.gather(1, i)) if turned else (lambda x, i: x.gather(1, i)))
    captured = check(model, *((index, x) if turned else (x, index)), batch=6)
    assert bounds(captured) == [("B", 0, 0, 2, None)]


def test_inputs_that_need_not_share_the_batch_do_not() -> None:
    captured = check(Fn(lambda x, y: (x * 2, y * 3)), torch.randn(4, 3), torch.randn(4, 3))
    assert [b[0] for b in bounds(captured)] == ["B", "B2"]


def test_other_leading_sizes_are_static() -> None:
    captured = check(Fn(lambda x, w: x @ w), torch.randn(4, 3), torch.randn(3, 2), batch=6)
    assert bounds(captured) == [("B", 0, 0, 2, None)] and captured.graph.inputs[1].shape == (3, 2)


def test_a_comparison_of_two_batches() -> None:
    check(Fn(lambda x, y: x + 1 if x.shape[0] == y.shape[0] else y), torch.randn(4, 3), torch.randn(4, 3))
    captured = check(Fn(lambda x, y: x + 1 if x.shape[0] == y.shape[0] else y), torch.randn(4, 3), torch.randn(3, 3))
    assert len(captured.graph.symbols) <= 1


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x.sum() > 0 else x - 1


class Reading(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * x.sum().item()


class Looping(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 1:
            x = x / 2
        return x


class Cond(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda y: y + 1, lambda y: y - 1, (x,))


class Result:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Custom(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        return Result(x)


class Stateful(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls, self.log = 0, [1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return x * self.calls


class Caching(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.last = x * 2
        return self.last


class Numpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(x.detach().numpy().sum())


class Unique(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.unique(x)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.register_buffer("w", torch.quantize_per_tensor(torch.randn(3), 0.1, 0, torch.qint8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w.dequantize()


class Failing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(99, 2)


class LazyOne(nn.LazyLinear):
    pass


REFUSED: list[Callable[[], nn.Module]] = [
    *(Branching, Reading, Looping, Cond, Custom, Stateful, Caching, Numpy, Quantised, Failing),
    Unique,
    lambda: LazyOne(3),
]


@pytest.mark.parametrize("build", REFUSED, ids=lambda b: getattr(b, "__name__", "model"))
def test_what_cannot_be_captured_says_so_in_one_sentence(build: Callable[[], nn.Module], capfd: Any) -> None:
    model = build()
    before = {k: copy.copy(v) for k, v in model.__dict__.items()}
    with pytest.raises(CaptureError) as caught:
        capture(model, (torch.randn(4, 3),))
    message = str(caught.value)
    assert message.startswith(f"{type(model).__name__} cannot be captured: ") and message.endswith(".")
    assert "\n" not in message and len(message) < 400
    assert {k: copy.copy(v) for k, v in model.__dict__.items() if k != "w"}.keys() == before.keys()
    assert same(
        {k: v for k, v in model.__dict__.items() if isinstance(v, int | list)},
        {k: v for k, v in before.items() if isinstance(v, int | list)},
    )
    assert capfd.readouterr() == ("", "")


def test_a_tensor_subclass_is_refused() -> None:
    class Special(torch.Tensor):
        pass

    with pytest.raises(CaptureError, match="Special"):
        capture(Fn(lambda x: x * 2), (torch.randn(4, 3).as_subclass(Special),))


def test_the_model_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Dropout(0.5))
    model(torch.randn(4, 5)).sum().backward()
    lstm = nn.LSTM(5, 6)
    held = (model.training, model[0].weight.grad, torch.get_rng_state(), torch.is_grad_enabled())
    buffers, weights = {k: v.clone() for k, v in model.named_buffers()}, list(lstm._flat_weights)
    capture(model, (torch.randn(4, 5),)) if not torch.set_rng_state(held[2]) else None
    state = torch.get_rng_state()
    capture(lstm, (torch.zeros(3, 4, 5),))
    capture(model, (torch.zeros(4, 5),))
    assert torch.equal(state, torch.get_rng_state())
    assert model.training is held[0] and model[0].weight.grad is held[1] and torch.is_grad_enabled()
    assert same(dict(model.named_buffers()), buffers)
    assert all(a is b for a, b in zip(lstm._flat_weights, weights, strict=True))
    assert lstm._flat_weights[0] is lstm.weight_ih_l0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)])
def test_the_surrounding_mode_does_not_enter_the_graph(mode: Callable[[], Any]) -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), torch.randn(4, 5, requires_grad=True)
    with mode():
        captured = capture(model, (x,))
    assert_equal(model, captured, (x,))
    assert not any(isinstance(n.op, Opaque) for n in captured.graph.nodes())


def test_random_opaque_operations_keep_their_stream() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = torch.rand_like(x)
        b = nn.functional.dropout(x, 0.5)
        torch.rand(2)  # unused, but it advances the stream
        return a + b + torch.randn(x.shape[0], 3) + torch.bernoulli(torch.sigmoid(x))

    captured = check(Fn(forward), torch.randn(4, 3), batch=2)
    assert opaque(captured) == ["rand_like", "rand", "randn", "bernoulli"]


def test_two_captures_of_one_model_are_one_graph() -> None:
    model, x = nn.Sequential(nn.Linear(5, 5), nn.ReLU()), torch.randn(4, 5)
    first, second = capture(model, (x,)), capture(model, (x,))
    assert first.graph.outputs == second.graph.outputs


def test_program_without_tensor_inputs() -> None:
    captured = capture(Fn(lambda: torch.arange(3) * 2), ())
    assert torch.equal(program_of(captured)(nn.Module(), (), {}), torch.arange(3) * 2)


def test_a_norm_that_averages_over_all_batches_is_named() -> None:
    """It reads its counter of batches in training."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=None))
    with pytest.raises(CaptureError, match="its BatchNorm2d with momentum=None counts batches"):
        capture(model, (torch.randn(2, 3, 6, 6),), {})
    assert capture(model.eval(), (torch.randn(2, 3, 6, 6),), {}).graph
