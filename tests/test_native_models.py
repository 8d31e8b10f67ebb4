"""Optimised models with CPU kernels, used in all the ways that models are used."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.runtime.native import NativeLauncher

inf, nan = float("inf"), float("nan")


class Image(nn.Module):
    """A convolution, its tail, and a head per sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 20, 3), nn.LayerNorm(20), nn.Linear(20, 7)

    def forward(self, x: Tensor) -> Tensor:
        y = F.max_pool2d(F.gelu(self.conv(x)), 2).mean((2, 3))
        return self.fc(self.norm(y)).softmax(1)


class Tokens(nn.Module):
    """A linear layer with what follows it, and rows of small operations."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.out = nn.Linear(12, 40), nn.LayerNorm(40), nn.Linear(40, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(F.silu(self.fc(x))).mean(1)).log_softmax(1)


class Mean(nn.Module):
    """A mean of a transposed convolution: range sums, a product and a logsumexp."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose2d(3, 9, 4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)).logsumexp(1, keepdim=True) * 10


class Plane(nn.Module):
    """Operations on values in memory alone."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(5, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(F.softplus(x + self.shift) - x.tanh(), 3, 2, 1).amax((2, 3))


MODELS: dict[str, tuple[type[nn.Module], tuple[int, ...]]] = {
    "image": (Image, (3, 3, 21, 19)),
    "tokens": (Tokens, (3, 9, 12)),
    "mean": (Mean, (3, 3, 11, 13)),
    "plane": (Plane, (3, 5, 17, 16)),
}


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path_factory.mktemp("kernels")))
        yield


@pytest.fixture(scope="module", params=MODELS)
def pair(request: pytest.FixtureRequest, own_cache: None) -> tuple[nn.Module, nn.Module, Tensor]:
    """An optimised model, the original and an input."""
    kind, shape = MODELS[request.param]
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(shape)
    fast = optimised(model, x)
    return fast, model, x


def optimised(model: nn.Module, x: Tensor) -> nn.Module:
    fast = fusewright.optimize(model, (x,), rewrite="always", kernels="always", verify=False, measure=False)
    plan = fusewright.explain(fast)
    assert plan.kernels and any(choice.path == "generated" for choice in plan.kernels), plan
    return fast


class Calls:
    """How often kernels ran."""

    count = 0


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Calls]]:
    run, before = NativeLauncher.__call__, torch.get_num_threads()

    def counted(self: NativeLauncher, *tensors: Tensor) -> Tensor:
        Calls.count += 1
        return run(self, *tensors)

    monkeypatch.setattr(NativeLauncher, "__call__", counted)
    yield Calls
    torch.set_num_threads(before)


def assert_same(fast: nn.Module, model: nn.Module, x: Tensor) -> None:
    """The fast one runs kernels and is as the original in float64, NaN and infinities included."""
    before = Calls.count
    with torch.no_grad():
        got, want = fast(x), copy.deepcopy(model).double()(x.double())
    assert Calls.count > before, "no kernel ran"
    assert got.shape == want.shape and got.dtype == x.dtype
    torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5, equal_nan=True)


Pair = tuple[nn.Module, nn.Module, Tensor]


@pytest.mark.parametrize("batch", [1, 2, 5, 64, 257])
@pytest.mark.sampled
def test_batches(pair: Pair, batch: int) -> None:
    fast, model, x = pair
    given = torch.randn(batch, *x.shape[1:], generator=torch.Generator().manual_seed(batch))
    fast(given)  # a batch of one is a signature of its own: the original runs, and a plan is made when it returns
    assert_same(fast, model, given)


def test_an_empty_batch(pair: Pair) -> None:
    fast, model, x = pair
    with torch.no_grad():
        got, want = fast(x[:0]), model(x[:0])
    assert got.shape == want.shape and got.dtype == want.dtype


@pytest.mark.parametrize("name", MODELS)
def test_an_empty_dimension(name: str) -> None:
    """As an example and as an input: what eager makes of it, a value or an error."""
    kind, shape = MODELS[name]
    model, x, nothing = kind().eval(), torch.randn(shape), torch.empty(*shape[:-2], 0, shape[-1])
    fast = optimised(model, x)
    try:
        want = model(nothing)
    except RuntimeError as error:
        with pytest.raises(RuntimeError, match=re.escape(str(error).splitlines()[0][:40])):
            fast(nothing)
        return
    for module in (fast, fusewright.optimize(model, (nothing,), kernels="always", verify=False, measure=False)):
        torch.testing.assert_close(module(nothing), want, equal_nan=True)


@pytest.mark.parametrize("value", [nan, inf, -inf, 1e30, -1e30, 1e-40, -0.0], ids=str)
@pytest.mark.parametrize("where", ["one", "row", "all"])
def test_unusual_values(pair: Pair, value: float, where: str) -> None:
    """As in float64: a NaN stays where eager has one, huge and tiny numbers keep their digits."""
    fast, model, x = pair
    given = x.clone()
    given.view(-1)[slice(None) if where == "all" else slice(7, 8) if where == "one" else slice(0, x.shape[-1])] = value
    assert_same(fast, model, given)


def test_memory_of_inputs(pair: Pair) -> None:
    fast, model, x = pair
    for given in (x[:, :1].expand(x.shape), torch.stack([x, x], -1)[..., 1], torch.cat([x, x])[::2]):
        assert_same(fast, model, given)
    unaligned = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
    assert unaligned.data_ptr() % 16
    assert_same(fast, model, unaligned)
    turned = x.transpose(1, -1).contiguous().transpose(1, -1)
    with torch.no_grad():
        torch.testing.assert_close(fast(turned), model(turned))
        torch.testing.assert_close(fast(turned), model(turned))


def test_inputs_stay_as_they_are(pair: Pair) -> None:
    fast, _, x = pair
    given, version = x.clone(), x._version
    with torch.no_grad():
        results = [fast(given), fast(given * 2)]
    assert torch.equal(given, x) and x._version == version
    assert not torch.equal(*results) and results[0].data_ptr() != results[1].data_ptr()


def test_numbers_of_threads(pair: Pair) -> None:
    """Set between calls, they change no bit."""
    fast, model, x = pair
    given = torch.cat([x] * 20)
    results = []
    for threads in (1, 2, 7, 3, 1):
        torch.set_num_threads(threads)
        assert_same(fast, model, given)
        with torch.no_grad():
            results.append(fast(given))
    assert all(torch.equal(results[0], r) for r in results[1:])


def test_modes(pair: Pair) -> None:
    fast, model, x = pair
    before = Calls.count
    with torch.inference_mode():
        torch.testing.assert_close(fast(x), model(x), rtol=1e-4, atol=1e-5)
    assert Calls.count > before
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(fast(x), model(x), rtol=0, atol=0)  # the original runs


def test_inference_tensors(pair: Pair) -> None:
    """Where gradients are wanted, eager takes them only if nothing keeps them for a backward."""
    fast, model, x = pair
    with torch.inference_mode():
        given = x * 1
    with torch.no_grad():
        torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)
    if isinstance(model, Plane):
        torch.testing.assert_close(fast(given), model(given), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("how", ["double", "float64 by default", "poisoned memory", "device by default", "shared"])
@pytest.mark.sampled
def test_settings(pair: Pair, how: str) -> None:
    fast, model, x = pair
    if how == "double":
        with torch.no_grad():
            wide, given = copy.deepcopy(fast).double(), x.double()
            for _ in range(3):
                torch.testing.assert_close(wide(given), copy.deepcopy(model).double()(given))
        return
    if how == "shared":
        x = x.clone().share_memory_()
    with ExitStack() as stack:
        if how == "float64 by default":
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(torch.float64)
        if how == "poisoned memory":  # what is allocated starts as NaN
            stack.callback(torch.use_deterministic_algorithms, False)
            torch.use_deterministic_algorithms(True)
        if how == "device by default":
            stack.enter_context(torch.device("meta"))
        before = Calls.count
        with torch.no_grad():
            got, want = fast(x), model(x)
    assert Calls.count > before
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_gradients(pair: Pair) -> None:
    fast, model, x = pair
    found = []
    for module in (fast, copy.deepcopy(model).double()):
        module.zero_grad()
        given = x.to(torch.float64 if module is not fast else x.dtype, copy=True).requires_grad_()
        module(given).square().sum().backward()
        found.append([given.grad.double(), *(p.grad.double() for p in module.parameters())])
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_training_goes_on(pair: Pair) -> None:
    """Steps of an optimiser are seen by kernels and by weights derived ahead."""
    _, model, x = pair
    model = copy.deepcopy(model)
    fast = optimised(model, x)
    steps = torch.optim.SGD(fast.parameters(), lr=0.05)
    for _ in range(3):
        steps.zero_grad()
        fast(x).square().mean().backward()
        steps.step()
        assert_same(fast, model, x)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(1.5)
    assert_same(fast, model, x)


def test_copies(pair: Pair) -> None:
    fast, model, x = pair
    assert_same(copy.deepcopy(fast), model, x)
    file = io.BytesIO()
    torch.save(fast, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert_same(loaded, model, x)
    assert_same(pickle.loads(pickle.dumps(loaded)), model, x)
    loaded.load_state_dict(fast.state_dict())
    assert_same(loaded, model, x)


def test_a_pickle_where_there_is_no_compiler(pair: Pair, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The original runs, then a plan without kernels."""
    fast, model, x = pair
    file = pickle.dumps(fast)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("FUSEWRIGHT_CACHE_DIR", str(tmp_path))
    loaded, before = pickle.loads(file), Calls.count
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(loaded(x), model(x), rtol=1e-4, atol=1e-5)
    assert Calls.count == before


def test_python_threads(pair: Pair) -> None:
    """Several call one module, with numbers of threads and batches of their own."""
    fast, model, x = pair

    def work(seed: int) -> bool:
        torch.set_num_threads(1 + seed % 3)
        given = torch.randn(2 + seed, *x.shape[1:], generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            want = fast(given)
            return all(torch.equal(fast(given), want) for _ in range(20)) and torch.allclose(
                want, model(given), rtol=1e-4, atol=1e-5
            )

    before = Calls.count
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert Calls.count > before


IN_FORKS = """
import os, sys, torch
sys.path[:0] = {path!r}
from test_native_models import MODELS, optimised
from torch.utils.data import DataLoader, Dataset

kind, shape = MODELS["image"]
torch.manual_seed(0)
model, x = kind().eval(), torch.randn(40, *shape[1:])
torch.set_num_threads(3)
fast = optimised(model, x)
with torch.no_grad():
    want = fast(x)

class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return fast(x)[index]

for workers in (0, 2):
    loader = DataLoader(Samples(), num_workers=workers, multiprocessing_context="fork" if workers else None)
    assert all(torch.equal(got[0], want[i]) for i, got in enumerate(loader)), workers

child = os.fork()
with torch.no_grad():
    right = torch.equal(fast(x), want) and len(os.listdir("/proc/self/task")) >= 3
if not child:
    os._exit(0 if right else 3)
assert right and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
print("done")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_forks() -> None:
    """Workers of a data loader and plain children call the module, in as many threads as their parent."""
    code = IN_FORKS.format(path=[str(Path(__file__).parent)])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout == "done\n", done.stderr


class Tied(nn.Module):
    """Values whose rows are samples and that are a weight as well, as many as those."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.randn(3, 3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.softmax(x @ y.mT + self.mask, -1) @ x


def test_values_that_are_read_by_sample_and_as_a_whole() -> None:
    model, given = Tied(), (torch.randn(3, 4), torch.randn(3, 4))
    f = fusewright.optimize(model, given, rewrite="always", kernels="always", verify=False, measure=False)
    torch.testing.assert_close(f(*given), model(*given))
