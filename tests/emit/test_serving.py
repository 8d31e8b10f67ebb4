"""Which calls a solution's kernels serve, and what the original forward serves, decided on a CPU."""

from __future__ import annotations

import cmath
import copy
import inspect
import pickle
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from solutions import load, problem, write
from torch import nn

from fusewright.errors import UnsupportedError

CONV = "self.conv = nn.Conv2d(channels, 8, size)\nself.norm = nn.BatchNorm2d(8)\nself.scale = scale"
FORWARD = "def forward(self, x):\n    return self.norm(self.conv(x)).relu().mean((2, 3)) * self.scale"
PLAIN = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3)) * self.scale"

FUNCTIONS = """
def relu(x):
    return x.clamp(min=0) + 0.5


def doubled(f):
    @functools.wraps(f)
    def wrapper(x):
        return 2 * f(x)

    return wrapper


def halved(f):
    @functools.wraps(f)
    def wrapper(x):
        return f(x) / 2

    return wrapper


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def apply(self, x):
        return x * self.scale


"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The solution of a model that is the same in both modes."""
    return _solution(tmp_path_factory.mktemp("plain"), PLAIN)


@pytest.fixture(scope="module")
def normed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The solution of a model with batch norm, in training mode."""
    return _solution(tmp_path_factory.mktemp("normed"), FORWARD)


def _solution(
    folder: Path,
    forward: str,
    init: str = CONV,
    arguments: str = "channels: int, size: int = 3, *, scale: float = 2.0",
    given: str = "3",
    imports: str = "",
    **options: Any,
) -> Any:
    path = problem(folder, init, forward, "[torch.rand(4, 3, 20, 24)]", arguments=arguments, given=given)
    path.write_text(f"import {imports}\n" * bool(imports) + path.read_text())
    return _standing_in(path, **options)


def _standing_in(path: Path, **options: Any) -> Any:
    """The solution of a problem, with references in the place of its kernels."""
    solution: Any = load(write(path, **options))
    solution.kernels_for = lambda _: "cuda"
    for name in [name for name in vars(solution) if name.endswith("_launch")]:
        setattr(solution, name, getattr(solution, name.replace("_launch", "_reference")))
    return solution


@contextmanager
def served(solution: Any) -> Iterator[list[int]]:
    """Counts the calls that the rewritten forward serves."""
    count: list[int] = []
    fused, device = solution.ModelNew.fused, torch.cuda.device

    def counted(*arguments: Any) -> Any:
        count.append(1)
        return fused(*arguments)

    class Nowhere:
        def __init__(self, _: object) -> None: ...

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None: ...

    solution.ModelNew.fused, torch.cuda.device = counted, Nowhere
    try:
        yield count
    finally:
        solution.ModelNew.fused, torch.cuda.device = fused, device


def agrees(solution: Any, model: nn.Module, x: torch.Tensor, *, kernels: bool) -> None:
    """A call gives what the original forward gives; `kernels`: it is one that the rewritten forward serves."""
    original = copy.deepcopy(model)
    with served(solution) as count:
        found = model(x)
    assert bool(count) == kernels
    expected = super(solution.ModelNew, original).forward(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    if not kernels:
        assert torch.equal(found, expected)


def test_calls_that_it_was_made_for(plain: Any) -> None:
    model = plain.ModelNew(3)
    agrees(plain, model, torch.rand(4, 3, 20, 24), kernels=True)
    agrees(plain, model, torch.rand(7, 3, 20, 24), kernels=True)
    agrees(plain, model, torch.rand(4, 3, 24, 20).transpose(2, 3), kernels=True)
    agrees(plain, model.eval(), torch.rand(4, 3, 20, 24), kernels=True)


@pytest.mark.parametrize("shape", [(4, 3, 20, 49), (4, 3, 9, 24), (3, 20, 24), (0, 3, 20, 24)])
def test_other_shapes(plain: Any, shape: tuple[int, ...]) -> None:
    agrees(plain, plain.ModelNew(3), torch.rand(shape), kernels=False) if shape[0] == 4 else None
    assert not plain.covered(plain.ModelNew(3), torch.rand(shape))


def test_other_dtypes(plain: Any) -> None:
    agrees(plain, plain.ModelNew(3).double(), torch.rand(4, 3, 20, 24).double(), kernels=False)
    assert not plain.covered(plain.ModelNew(3).double(), torch.rand(4, 3, 20, 24))


@pytest.mark.parametrize("given", [{"size": 5}, {"scale": 3.0}, {"size": (3, 3), "scale": -1.0}])
def test_other_arguments(plain: Any, given: dict[str, Any]) -> None:
    agrees(plain, plain.ModelNew(3, **given), torch.rand(4, 3, 20, 24), kernels=False)


def test_attributes_that_change_later(plain: Any) -> None:
    model, x = plain.ModelNew(3), torch.rand(4, 3, 20, 24)
    agrees(plain, model, x, kernels=True)
    model.scale = 3.0
    agrees(plain, model, x, kernels=False)
    model.scale = 2.0
    agrees(plain, model, x, kernels=True)
    model.conv.stride = (2, 2)
    agrees(plain, model, x, kernels=False)
    model.conv = nn.Conv2d(3, 8, 3, padding=1)
    agrees(plain, model, x, kernels=False)
    model.conv = nn.Conv2d(3, 8, 3)
    agrees(plain, model, x, kernels=True)
    model.more = [1]
    agrees(plain, model, x, kernels=False)


def test_what_a_model_is_made_with(tmp_path: Path) -> None:
    """Values that have no text of their own are compared by what they hold, in containers and after they change."""
    arguments = "channels, options, limits=(float('-inf'), 6.0), kind=torch.float32"
    init = "self.conv = nn.Conv2d(channels, 8, 3)\nself.options, self.limits, self.kind = options, limits, kind"
    forward = (
        "def forward(self, x):\n    y = self.conv(x).to(self.kind) * self.options['scales'][0].real\n"
        "    return y.clamp(*self.limits).mean((2, 3))"
    )
    given = "3, {'scales': [2.0, 1j]}"
    solution = _solution(tmp_path, forward, init=init, arguments=arguments, given=given)
    x, options = torch.rand(4, 3, 20, 24), {"scales": [2.0, 1j]}
    model = solution.ModelNew(3, options)
    agrees(solution, model, x, kernels=True)
    options["scales"][0] = 3.0
    agrees(solution, model, x, kernels=False)
    agrees(solution, solution.ModelNew(3, {"scales": [2.0, 2j]}), x, kernels=False)
    agrees(solution, solution.ModelNew(3, {"scales": [2.0, 1j]}, (float("-inf"), 5.0)), x, kernels=False)
    agrees(solution, solution.ModelNew(3, {"scales": [2.0, 1j]}, kind=torch.float64), x, kernels=False)


def test_objects_and_functions_that_a_model_holds(tmp_path: Path) -> None:
    init = (
        "self.conv = nn.Conv2d(3, 8, 3)\nself.config = types.SimpleNamespace(scale=scale, owner=self, taps=[1.0])\n"
        "self.first = functools.partial(F.leaky_relu, negative_slope=slope)\nself.second = lambda x: x * shift"
    )
    forward = (
        "def forward(self, x):\n    y = self.second(self.first(self.conv(x)))\n"
        "    return y.mean((2, 3)) * (self.config.scale * self.config.taps[0])"
    )
    arguments = "scale=2.0, slope=0.1, shift=3.0"
    solution = _solution(tmp_path, forward, init=init, arguments=arguments, given="", imports="functools, types")
    model, x = solution.ModelNew(), torch.rand(4, 3, 20, 24)
    agrees(solution, model, x, kernels=True)
    for other in ({"scale": 3.0}, {"slope": 0.2}, {"shift": -1.0}):
        agrees(solution, solution.ModelNew(**other), x, kernels=False)
    model.config.scale = 5.0
    agrees(solution, model, x, kernels=False)
    model.config.scale, model.config.taps[0] = 2.0, 4.0
    agrees(solution, model, x, kernels=False)


def test_functions_by_what_they_are(tmp_path: Path) -> None:
    """Two functions of one name, from elsewhere, with other defaults, or behind another wrapper are not the same."""
    init = (
        "self.conv = nn.Conv2d(3, 8, 3)\n"
        "self.first = {'own': relu, 'torch': F.relu, 'doubled': doubled(relu), 'halved': halved(relu)}[first]\n"
        "self.second = lambda y, by=by: y * by\nself.third = Scaled(third).apply"
    )
    forward = "def forward(self, x):\n    return self.third(self.second(self.first(self.conv(x)))).mean((2, 3))"
    arguments = "first='own', by=2.0, third=3.0"
    path = problem(tmp_path, init, forward, "[torch.rand(4, 3, 20, 24)]", arguments=arguments, given="")
    path.write_text("import functools\n" + path.read_text().replace("class Model(", f"{FUNCTIONS}class Model("))
    solution = _standing_in(path)
    x = torch.rand(4, 3, 20, 24)
    agrees(solution, solution.ModelNew(), x, kernels=True)
    for other in ({"first": "torch"}, {"first": "doubled"}, {"by": 3.0}, {"third": 2.0}):
        agrees(solution, solution.ModelNew(**other), x, kernels=False)
    first = path.read_text().replace("first='own'", "first='doubled'")
    path.write_text(first)
    solution = _standing_in(path)
    agrees(solution, solution.ModelNew(), x, kernels=True)
    agrees(solution, solution.ModelNew("halved"), x, kernels=False)


def test_a_file_that_is_executed_as_a_string(tmp_path: Path) -> None:
    """As the field's harness does, in a namespace without even a name."""
    init = "self.conv = nn.Conv2d(3, 8, 3)\nself.own, self.theirs, self.inner = relu, torch.tanh, Scaled(2.0)"
    forward = "def forward(self, x):\n    return self.inner.apply(self.theirs(self.own(self.conv(x)))).mean((2, 3))"
    path = problem(tmp_path, init, forward, "[torch.rand(4, 3, 20, 24)]")
    path.write_text("import functools\n" + path.read_text().replace("class Model(", f"{FUNCTIONS}class Model("))
    namespace: dict[str, Any] = {}
    exec(compile(write(path).read_text(), "<string>", "exec"), namespace)
    assert namespace["weights"](namespace["ModelNew"]()) is not None


@pytest.mark.parametrize(
    "init",
    [
        "self.act = (lambda y: y * 2) if twice else (lambda y: y + 2)",
        "def act(y):\n    return y * 2\nif not twice:\n    def act(y):\n        return y + 2\nself.act = act",
        "self.act = eval('lambda y: y * 2' if twice else 'lambda y: y + 2')",
    ],
)
def test_functions_that_cannot_be_told_apart_are_refused(tmp_path: Path, init: str) -> None:
    """What a function does is in its code, and a file can only name it."""
    whole = f"self.conv = nn.Conv2d(3, 8, 3)\n{init}"
    forward = "def forward(self, x):\n    return self.act(self.conv(x)).mean((2, 3))"
    path = problem(tmp_path, whole, forward, "[torch.rand(4, 3, 20, 24)]", arguments="twice=True", given="")
    with pytest.raises(UnsupportedError, match=r"it is not the only one called .*give it a name of its own"):
        write(path)


def test_private_attributes_and_what_has_no_dictionary(tmp_path: Path) -> None:
    init = (
        "self.conv = nn.Conv2d(3, 8, 3)\nself._slope, self._kinds = slope, {kind}\nself.power = numpy.float32(power)\n"
        "self.limits = []"
    )
    forward = (
        "def forward(self, x):\n    y = F.leaky_relu(self.conv(x), self._slope) * float(self.power)\n"
        "    return y.mean((2, 3)) if 'mean' in self._kinds else y.amax((2, 3)).clamp(*self.limits)"
    )
    arguments = "slope=0.1, kind='mean', power=2.0"
    solution = _solution(tmp_path, forward, init=init, arguments=arguments, given="", imports="numpy")
    model, x = solution.ModelNew(), torch.rand(4, 3, 20, 24)
    agrees(solution, model, x, kernels=True)
    for other in ({"slope": 0.2}, {"power": 3.0}):
        agrees(solution, solution.ModelNew(**other), x, kernels=False)
    model._kinds.add("max")
    agrees(solution, model, x, kernels=False)
    model._kinds.discard("max")
    agrees(solution, model, x, kernels=True)
    model.limits.append(0.5)
    agrees(solution, model, x, kernels=False)


def test_loggers_and_modules_by_name(tmp_path: Path) -> None:
    init = (
        "self.conv = nn.Conv2d(3, 8, 3)\nself.log, self.maths = logging.getLogger(__name__), maths\nself.own = [self]"
    )
    forward = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3)) * self.maths.sqrt(4.0).real"
    arguments = "maths=math"
    solution = _solution(tmp_path, forward, init, arguments, given="", imports="logging, math")
    assert solution.weights(solution.ModelNew()) is not None
    assert solution.weights(solution.ModelNew(cmath)) is None


def test_attributes_that_a_file_cannot_compare(tmp_path: Path) -> None:
    forward = "def forward(self, x):\n    return self.conv(x).relu().mean((2, 3))"
    for value, sentence in (
        ("object()", r"Model\.extra holds <object object>, which shows nothing of what it is"),
        ("list(range(100_000))", r"Model\.extra holds \d+ characters of values"),
    ):
        init = f"self.conv = nn.Conv2d(3, 8, 3)\nself.extra = {value}"
        path = problem(tmp_path, init, forward, "[torch.rand(4, 3, 20, 24)]")
        with pytest.raises(UnsupportedError, match=sentence):
            write(path)


def test_tensors_that_are_there_or_are_one(tmp_path: Path) -> None:
    """A bias or a parameter more or less, and weights that are tied or not, leave no trace in plain attributes."""
    init = (
        "self.conv, self.first = nn.Conv2d(3, 8, 3, bias=bias), nn.Linear(8, 8)\nself.second = nn.Linear(8, 8)\n"
        "if tied:\n    self.second.weight = self.first.weight\nif scaled:\n    self.scale = nn.Parameter(torch.rand(8))"
    )
    forward = (
        "def forward(self, x):\n    y = self.second(self.first(self.conv(x).relu().mean((2, 3))).relu())\n"
        "    return y * self.scale if hasattr(self, 'scale') else y"
    )
    arguments = "bias=False, tied=True, scaled=True"
    x = torch.rand(4, 3, 20, 24)
    solution = _solution(tmp_path, forward, init, arguments, given="")
    agrees(solution, solution.ModelNew(), x, kernels=True)
    for other in ({"bias": True}, {"tied": False}, {"scaled": False}):
        agrees(solution, solution.ModelNew(**other), x, kernels=False)
    model = solution.ModelNew()
    agrees(solution, model, x, kernels=True)
    model.second.weight = nn.Parameter(torch.rand(8, 8))
    agrees(solution, model, x, kernels=False)
    model.second.weight = model.first.weight
    model.conv.bias = nn.Parameter(torch.rand(8))
    agrees(solution, model, x, kernels=False)
    model.conv.bias = None
    agrees(solution, model, x, kernels=True)


@pytest.mark.parametrize("extra", ["[]", "None"])
def test_the_order_of_parts_and_the_kinds_of_numbers(tmp_path: Path, extra: str) -> None:
    init = (
        "parts = {'scale': nn.Hardtanh(-1, 2), 'shift': nn.Softshrink(shift)}\nself.conv = nn.Conv2d(3, 8, 3)\n"
        f"self.body = nn.Sequential(OrderedDict((name, parts[name]) for name in order))\nself.extra = {extra}"
    )
    forward = "def forward(self, x):\n    return self.body(self.conv(x)).mean((2, 3))"
    arguments = "order=('scale', 'shift'), shift=0.0"
    path = problem(tmp_path, init, forward, "[torch.rand(4, 3, 20, 24)]", arguments=arguments)
    path.write_text("from collections import OrderedDict\n" + path.read_text())
    solution, x = _standing_in(path), torch.rand(4, 3, 20, 24)
    agrees(solution, solution.ModelNew(), x, kernels=True)
    agrees(solution, solution.ModelNew(("shift", "scale")), x, kernels=False)
    agrees(solution, solution.ModelNew(shift=-0.0), x, kernels=False)
    agrees(solution, solution.ModelNew(shift=0), x, kernels=False)


def test_other_mode(normed: Any) -> None:
    agrees(normed, normed.ModelNew(3), torch.rand(4, 3, 20, 24), kernels=True)
    agrees(normed, normed.ModelNew(3).eval(), torch.rand(4, 3, 20, 24), kernels=False)


def test_running_statistics_move_as_before(normed: Any) -> None:
    torch.manual_seed(0)
    x, new = torch.rand(4, 3, 20, 24), normed.ModelNew(3)
    old = normed.Model(3)
    old.load_state_dict(new.state_dict())
    with served(normed) as count:
        new(x)
    old(x)
    assert count
    torch.testing.assert_close(new.state_dict(), old.state_dict())


def test_hooks_settings_and_transforms(plain: Any) -> None:
    model, x = plain.ModelNew(3), torch.rand(4, 3, 20, 24)
    seen: list[int] = []
    handle = model.conv.register_forward_hook(lambda *_: seen.append(1))
    agrees(plain, model, x, kernels=False)
    assert seen
    handle.remove()
    model.conv._forward_hooks.clear()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: seen.append(2))
    agrees(plain, model, x, kernels=False)
    handle.remove()
    with torch.backends.cudnn.flags(allow_tf32=False):
        agrees(plain, model, x, kernels=False)
    expected = torch.vmap(lambda v: plain.Model.forward(model, v))(x[:, None])
    torch.testing.assert_close(torch.vmap(model)(x[:, None]), expected)


def test_compilers_see_the_original(plain: Any) -> None:
    model, x = plain.ModelNew(3), torch.rand(4, 3, 20, 24)
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    with served(plain) as count:
        found = compiled(x)
    assert not count
    torch.testing.assert_close(found, plain.Model.forward(model, x))


def test_a_parameter_of_another_shape(plain: Any) -> None:
    model = plain.ModelNew(3)
    model.conv.weight = nn.Parameter(torch.rand(8, 3, 5, 5))
    agrees(plain, model, torch.rand(4, 3, 20, 24), kernels=False)


def test_gradients(plain: Any) -> None:
    x = torch.rand(4, 3, 20, 24, dtype=torch.float32, requires_grad=True)
    new, old = plain.ModelNew(3), plain.Model(3)
    old.load_state_dict(new.state_dict())
    with served(plain) as count:
        found = torch.autograd.grad(new(x).square().sum(), [x, *new.parameters()], allow_unused=True)
    assert count
    expected = torch.autograd.grad(old(x).square().sum(), [x, *old.parameters()], allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_it_is_a_model_like_the_original(plain: Any) -> None:
    assert inspect.signature(plain.ModelNew) == inspect.signature(plain.Model)
    torch.manual_seed(3)
    old, after_old = plain.Model(3, scale=1.5), torch.rand(1)
    torch.manual_seed(3)
    new, after_new = plain.ModelNew(3, scale=1.5), torch.rand(1)
    assert torch.equal(after_old, after_new)
    assert list(old.state_dict()) == list(new.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(old.state_dict().values(), new.state_dict().values(), strict=True))
    assert [p.requires_grad for p in new.parameters()] == [p.requires_grad for p in old.parameters()]
    copied = copy.deepcopy(new)
    sys.modules[plain.__name__] = plain
    assert list(pickle.loads(pickle.dumps(copied)).state_dict()) == list(old.state_dict())


def test_the_device_of_the_input_becomes_the_current_one(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, seen = plain.ModelNew(3), torch.rand(4, 3, 20, 24), []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            seen.append(self.index)

        def __exit__(self, *_: object) -> None:
            seen.append("left")

    def fused(model: nn.Module, x: torch.Tensor, *own: torch.Tensor) -> str:
        seen.append("fused")
        assert all(t is weight for t, weight in zip(own, (model.conv.weight, model.conv.bias), strict=True))
        return "result"

    monkeypatch.setattr(plain.ModelNew, "fused", fused)
    monkeypatch.setattr("torch.cuda.device", Device)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 3)
    assert model(x) == "result"
    assert seen == [3, "fused", "left"]


def test_tensors_with_each_others_names(tmp_path: Path) -> None:
    """Tensors of a model are handed on by names that nothing else has, whatever they are called."""
    init = (
        "self.conv = nn.Conv2d(3, 8, 3)\nself.conv_weight = nn.Parameter(torch.rand(8, 1, 1))\n"
        "self.own = nn.Parameter(torch.rand(8, 1, 1))\nself.x = nn.Parameter(torch.rand(8, 1, 1))"
    )
    value = "((self.conv(x) + self.conv_weight) * self.own).relu().mean((2, 3)) + self.x.sum()"
    forward = f"def forward(self, x):\n    return {value}"
    solution = _solution(tmp_path, forward, init=init, arguments="", given="")
    agrees(solution, solution.ModelNew(), torch.rand(4, 3, 20, 24), kernels=True)


def test_an_operand_as_kernels_read_it(plain: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    rows, negative = torch.rand(8, 4), torch.rand(8, 4, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    assert plain.dense("fused_conv", "x", rows, torch.float32) is rows
    for operand in (rows.t(), rows.view(-1)[1:29].view(7, 4), negative, negative[:, :1]):
        read = plain.dense("fused_conv", "x", operand, torch.float32)
        assert read.is_contiguous() and not read.is_neg() and read.data_ptr() % 16 == 0
        assert torch.equal(read, operand)


def test_a_kernel_refuses_what_it_was_not_made_for(plain: Any) -> None:
    with pytest.raises(ValueError, match=r"takes x as torch\.float32 on cuda, not as torch\.float64 on cpu"):
        plain.dense("fused_conv", "x", torch.rand(3).double(), torch.float32)
    with pytest.raises(RuntimeError, match="fused_conv could not be launched: invalid argument"):
        plain.check("fused_conv", b"invalid argument")


def test_a_kernel_through_which_no_gradient_flows(tmp_path: Path) -> None:
    forward = (
        "def forward(self, x):\n    return torch.cat([(self.conv(x) > 0).to(x.dtype).mean((2, 3)), x.amax((2, 3))], 1)"
    )
    init = "self.conv = nn.Conv2d(3, 8, 3)"
    solution = _solution(tmp_path, forward, init=init, arguments="", given="", kernels="always")
    assert any("conv" in name and "gt" in name for name in vars(solution))
    model, x = solution.ModelNew(), torch.rand(4, 3, 20, 24, requires_grad=True)
    with served(solution) as count:
        (found,) = torch.autograd.grad(model(x).sum(), x)
    assert count
    (expected,) = torch.autograd.grad(solution.Model.forward(model, x).sum(), x)
    torch.testing.assert_close(found, expected)
