"""Forwards as CUDA graphs on a GPU: the same bits as the program's, whatever happens between calls."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright.dispatch import Runner
from fusewright.module import state_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    """Small layers, for which a GPU waits."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for channels in (3, 16, 16, 16, 16):
            layers += [nn.Conv2d(channels, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).mean((2, 3)))


def images(batch: int = 2) -> Tensor:
    return torch.randn(batch, 3, 32, 32, device="cuda")


def recorded() -> tuple[nn.Module, nn.Module, Runner]:
    torch.manual_seed(0)
    model = Net().cuda().eval()
    f = fusewright.optimize(
        model, (images(),), graphs="always", kernels="never", rewrite="always", verify=False, measure=False
    )
    state = state_of(f)
    assert state is not None
    (runner,) = {id(e.runner): e.runner for e in state.entries.values()}.values()
    assert runner is not None and runner.recorder is not None, fusewright.explain(f)
    return model, f, runner


def replays(runner: Runner) -> int:
    assert runner.recorder is not None
    return runner.recorder.replays


def agree(f: nn.Module, model: nn.Module, x: Tensor) -> None:
    with torch.no_grad():
        found, want = f(x), model(x)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4, check_stride=True)


def test_a_replay_has_the_bits_of_the_program() -> None:
    _, f, runner = recorded()
    x = images()
    with torch.no_grad():
        first = f(x)
        found = [f(x) for _ in range(4)]
    assert replays(runner) > 2 and all(torch.equal(first, y) for y in found)
    assert len({y.data_ptr() for y in found}) == len(found)  # and memory of its own


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.head.weight.mul_(2),
    "what weights are derived from": lambda m: m.body[1].running_mean.add_(1),
    "through data": lambda m: setattr(m.head.weight, "data", torch.randn_like(m.head.weight)),
    "another parameter": lambda m: setattr(m.head, "weight", nn.Parameter(torch.randn_like(m.head.weight))),
    "away and back": lambda m: (m.cpu(), torch.cuda.empty_cache(), m.cuda()),
    "the mode": lambda m: m.train(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_of_the_module_are_seen(change: str) -> None:
    model, f, runner = recorded()
    for _ in range(3):
        agree(f, model, images())
    assert replays(runner)
    with torch.no_grad():
        CHANGES[change](model)
    for _ in range(4):
        agree(f, model, images())


def test_settings_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, runner = recorded()
    for _ in range(3):
        agree(f, model, images())
    before = replays(runner)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    agree(f, model, images())
    assert replays(runner) == before


def test_shapes_and_layouts() -> None:
    model, f, runner = recorded()
    for x in (images(5), images(), images(4)[::2], images().to(memory_format=torch.channels_last)):
        for _ in range(4):
            agree(f, model, x)
    assert replays(runner) > 3


def test_inference_mode() -> None:
    model, f, _ = recorded()
    x = images()
    with torch.inference_mode():
        for _ in range(3):
            y = f(x)
        assert y.is_inference()
    agree(f, model, x)


def test_streams_take_turns() -> None:
    model, f, runner = recorded()
    side = torch.cuda.Stream()
    for _ in range(20):
        x = images()
        torch.cuda.synchronize()
        with torch.cuda.stream(side), torch.no_grad():
            first = f(x)
        with torch.no_grad():
            second = f(x * 2)
            torch.cuda.synchronize()
            for y, want in ((first, model(x)), (second, model(x * 2))):
                torch.testing.assert_close(y, want, rtol=1e-3, atol=1e-4)
    assert replays(runner) > 30


def test_threads() -> None:
    model, f, _ = recorded()
    wrong: list[BaseException] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(30):
                    agree(f, model, images())
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_graph_of_the_callers_own() -> None:
    model, f, runner = recorded()
    x, graph = images(), torch.cuda.CUDAGraph()
    for _ in range(3):
        agree(f, model, x)
    before = replays(runner)
    with torch.no_grad():
        with torch.cuda.graph(graph):
            y = f(x)
        x.normal_()
        graph.replay()
        torch.testing.assert_close(y, model(x), rtol=1e-3, atol=1e-4)
    assert replays(runner) == before


def test_recordings_come_and_go() -> None:
    for _ in range(3):
        model, f, runner = recorded()
        for _ in range(4):
            agree(f, model, images())
        assert replays(runner) > 0, runner.recorder.reason if runner.recorder else ""
        del model, f, runner
        torch.cuda.empty_cache()


class OnTheHost(nn.Module):
    """A number kept on the CPU, which a recording would keep as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv(x)).mean((2, 3)) * self.factor


class Shared(nn.Module):
    """Results that share memory, with each other and with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = F.relu(self.conv(x)).mean((2, 3))
        return y, y[:1], x


class Drawing(Shared):
    def forward(self, x: Tensor) -> Any:
        return F.dropout(self.conv(x), 0.5, training=True).mean((2, 3))


@pytest.mark.parametrize("kind", [OnTheHost, Shared, Drawing])
def test_what_cannot_be_recorded_runs_as_it_did(kind: type[nn.Module]) -> None:
    model, x = kind().cuda().eval(), images()
    if isinstance(model, OnTheHost):
        model.factor = model.factor.cpu()
    f = fusewright.optimize(model, (x,), graphs="always", kernels="never", verify=False)
    assert all(k.path != "recorded" for k in fusewright.explain(f).kept)
    with torch.no_grad():
        torch.manual_seed(1)
        found = f(x)
        torch.manual_seed(1)
        torch.testing.assert_close(found, model(x), rtol=1e-3, atol=1e-4)


def test_a_capture_that_fails_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, runner = recorded()
    x = images()

    assert runner.recorder is not None
    with torch.no_grad(), monkeypatch.context() as patch:
        forward = runner._forward
        # waits for the device, which no capture stands
        patch.setattr(runner, "_forward", lambda *given: (forward(*given), forward(*given).sum().item())[0])
        for _ in range(4):
            torch.testing.assert_close(f(x), model(x), rtol=1e-3, atol=1e-4)
    assert runner.recorder.reason and replays(runner) == 0
    torch.rand(4, device="cuda")
    agree(f, model, images())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
    graph.replay()
    assert torch.equal(y, x * 2)
    _, again, runner = recorded()
    with torch.no_grad():
        for _ in range(4):
            again(x)
    assert replays(runner) > 0  # nothing is left of it


@pytest.mark.filterwarnings("error")
def test_memory_goes_with_the_recording() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    for turn in range(4):
        model, f, runner = recorded()
        x = images(64)
        with torch.no_grad():
            for _ in range(4):
                f(x)
        assert replays(runner) > 0
        del model, f, runner, x
        gc.collect()
        torch.cuda.empty_cache()
        if turn == 1:
            before = torch.cuda.memory_reserved()
    assert torch.cuda.memory_reserved() == before


def test_other_threads_draw_while_a_forward_is_captured() -> None:
    """A `torch.cuda.CUDAGraph` refuses them."""
    wrong: list[BaseException] = []
    over = threading.Event()

    def draw() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                while not over.is_set():
                    torch.rand(8, device="cuda")
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for _ in range(4):
            _, f, runner = recorded()
            with torch.no_grad():
                for _ in range(6):
                    f(images())
            assert replays(runner) > 0, runner.recorder
    finally:
        over.set()
        thread.join()
    assert not wrong


def test_a_pool_of_the_callers_may_go() -> None:
    """What is recorded lies elsewhere, or is not recorded."""
    model, f, runner = recorded()
    x, pool = images(3), torch.cuda.MemPool()
    with torch.no_grad(), torch.cuda.use_mem_pool(pool):
        for _ in range(4):
            agree(f, model, x)
    assert runner.recorder is not None
    assert replays(runner) > 0 or "pool" in runner.recorder.reason
    del pool
    torch.cuda.empty_cache()
    for _ in range(4):
        agree(f, model, images(3))
