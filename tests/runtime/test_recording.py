"""`fusewright.runtime.recording` without a GPU: which calls are recorded, replayed, and left to the program."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from dropin import same
from torch import Tensor, nn
from torch.nn import functional as F

import fusewright
from fusewright import pipeline
from fusewright.dispatch import Runner, State
from fusewright.module import state_of
from fusewright.runtime import recording
from fusewright.runtime.recording import MOST, OLD, PAID, Surroundings


class Taped:
    """A recording that computes on its own copies, as a graph on a GPU does: what it reads is what was there then."""

    made, launched = 0, 0

    def __init__(self, forward: Any, module: Any, tensors: Sequence[Tensor], around: Any) -> None:
        type(self).made += 1
        self.around, self.calls, self.last, self.share = around, 0, 0, 0.0
        self._forward = lambda *given: forward(module, *given, *around.derived)

    def __call__(self, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
        self.calls += 1
        type(self).launched += 1
        with torch.no_grad():
            return (self._forward(*tensors),)


@pytest.fixture(autouse=True)
def taped(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    Taped.made = Taped.launched = 0
    monkeypatch.setattr(recording, "Recording", Taped)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.mix = nn.Parameter(torch.randn(4, 4))
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).mean((2, 3)) @ self.mix * self.scale


def recorded(*, alone: bool = True, most: int = 1 << 20) -> tuple[Net, nn.Module, Tensor, Runner]:
    """A model, its replacement, an input, and the program with its recorder."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 3, 8, 8)
    f = fusewright.optimize(model, (x,), rewrite="always", measure=False)
    entries = state(f).entries
    for key, entry in entries.items():
        assert entry.runner is not None
        entries[key] = replace(entry, runner=entry.runner.as_recorded(most, alone=alone))
    (runner,) = (entry.runner for entry in entries.values())
    assert runner is not None and runner.recorder is not None
    return model, f, x, runner


def state(module: nn.Module) -> State:
    found = state_of(module)
    assert found is not None
    return found


def replays(runner: Runner) -> int:
    assert runner.recorder is not None
    return runner.recorder.replays


@torch.no_grad()
def test_calls_that_recur_are_recorded() -> None:
    model, f, x, runner = recorded()
    for expected in (0, 0, 1, 2, 3):
        same(f, model, x, program=True)
        assert replays(runner) == expected
    assert Taped.made == 1


@torch.no_grad()
def test_each_shape_has_its_own_recording() -> None:
    model, f, _, runner = recorded()
    for _ in range(4):
        for batch in (2, 5):
            same(f, model, torch.randn(batch, 3, 8, 8))
    assert Taped.made == 2 and replays(runner) == 4


@torch.no_grad()
def test_larger_inputs_than_were_measured_are_not_recorded() -> None:
    model, f, x, runner = recorded(most=2 * 3 * 8 * 8)
    for _ in range(4):
        same(f, model, torch.randn(3, 3, 8, 8))
    assert replays(runner) == 0
    for _ in range(4):
        same(f, model, x)
    assert replays(runner) == 2


@torch.no_grad()
def test_so_many_recordings_are_held() -> None:
    model, f, _, _ = recorded()
    for batch in range(2, 2 * MOST):
        for _ in range(3):
            same(f, model, torch.randn(batch, 3, 8, 8))
    assert Taped.made == MOST


@torch.no_grad()
def test_recordings_that_nobody_calls_make_room() -> None:
    model, f, x, runner = recorded()
    for batch in range(3, 3 + MOST):
        for _ in range(2):
            f(torch.randn(batch, 3, 8, 8))
    for _ in range(OLD + 8):
        f(x)
    assert Taped.made == MOST + 1 and replays(runner) > 0
    same(f, model, x)


@torch.no_grad()
def test_what_takes_too_much_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MOST_HELD", -1.0)
    model, f, x, runner = recorded()
    for _ in range(5):
        same(f, model, x)
    assert replays(runner) == 0 and Taped.made == 1 and runner.recorder is not None
    assert "of the device's memory" in runner.recorder.reason


def test_calls_with_gradients_are_not_replayed() -> None:
    model, f, x, runner = recorded()
    for _ in range(4):
        f(x).sum().backward()
    assert replays(runner) == 0 and model.conv.weight.grad is not None


CHANGES: dict[str, Any] = {
    "in place": lambda m: m.conv.weight.mul_(2),
    "through data": lambda m: setattr(m.conv.weight, "data", torch.randn_like(m.conv.weight)),
    "another parameter": lambda m: setattr(m.conv, "weight", nn.Parameter(torch.randn_like(m.conv.weight))),
    "an attribute": lambda m: setattr(m, "scale", 3.0),
    "loaded": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}),
    "turned in its place": lambda m: setattr(m.mix, "data", m.mix.data.t()),
    "assigned": lambda m: m.load_state_dict({k: v + 1 for k, v in m.state_dict().items()}, assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
@pytest.mark.sampled
def test_a_change_is_seen(change: str) -> None:
    model, f, x, _ = recorded()
    for _ in range(3):
        same(f, model, x)
    CHANGES[change](model)
    for _ in range(4):
        same(f, model, x)


@torch.no_grad()
def test_settings_are_part_of_what_was_recorded() -> None:
    _, f, x, runner = recorded()
    for _ in range(3):
        f(x)
    before, enabled = replays(runner), torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(not enabled)
    try:
        f(x)
    finally:
        torch.backends.cuda.enable_flash_sdp(enabled)
    assert replays(runner) == before


class Reading(nn.Module):
    """Reads a parameter and a buffer itself, and others through what is derived of them."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean((2, 3))
        return torch.sigmoid(y @ self.mix) @ self.shift


def ahead_of_changes() -> tuple[Reading, nn.Module, Tensor, Runner]:
    """Recorded for a GPU, where launches go ahead of all that need not be known before."""
    torch.manual_seed(0)
    model, x = Reading().eval(), torch.randn(2, 3, 8, 8)
    f = fusewright.optimize(model, (x,), rewrite="always", kernels="never", measure=False)
    entries = state(f).entries
    ((key, entry),) = entries.items()
    assert entry.runner is not None
    runner = entry.runner.as_recorded(1 << 20, alone=True)
    runner.may_go_ahead = True
    entries[key] = replace(entry, runner=runner)
    assert {"mix", "shift"} <= set(runner.program.reads) and "norm.running_mean" in runner.program.sources
    for _ in range(3):
        same(f, model, x)
    assert replays(runner) == Taped.launched == 1
    return model, f, x, runner


GONE: dict[str, Any] = {
    "a parameter": lambda m: setattr(m.mix, "data", torch.randn_like(m.mix)),
    "a buffer": lambda m: setattr(m.shift, "data", torch.randn_like(m.shift)),
    "all": lambda m: m._apply(torch.clone),
}


@pytest.mark.parametrize("change", GONE)
@torch.no_grad()
def test_nothing_is_launched_whose_memory_may_be_gone(change: str) -> None:
    model, f, x, _ = ahead_of_changes()
    GONE[change](model)
    same(f, model, x)
    assert Taped.launched == 1


DROPPED: dict[str, Any] = {
    "strides of a buffer": lambda m: setattr(m.shift, "data", m.shift.data.t()),
    "shape of a buffer": lambda m: setattr(m.shift, "data", m.shift.data[:, :3]),
    "dtype of a buffer": lambda m: setattr(m.shift, "data", m.shift.data.view(torch.int32)),
    "strides of a parameter": lambda m: setattr(m.mix, "data", m.mix.data.t()),
    "what weights are derived from": lambda m: m.norm.running_mean.add_(1),
    "another parameter": lambda m: setattr(m.conv, "bias", nn.Parameter(torch.randn(4))),
    "a setting": lambda m: torch.set_default_dtype(torch.float64),
    "the mode": lambda m: m.norm.train(),
}


@pytest.mark.parametrize("change", DROPPED)
@torch.no_grad()
@pytest.mark.sampled
def test_what_was_launched_is_dropped_where_something_else_has_changed(change: str) -> None:
    model, f, x, runner = ahead_of_changes()
    DROPPED[change](model)
    try:
        if model.shift.is_floating_point():
            torch.testing.assert_close(f(x), Reading.forward(copy.deepcopy(model), x))
        else:  # which no product takes
            with pytest.raises(RuntimeError):
                f(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert Taped.launched == 2 and (replays(runner) == 1 or change in ("another parameter", "the mode"))


@pytest.mark.parametrize("change", DROPPED)
@torch.no_grad()
@pytest.mark.sampled
def test_what_may_not_go_ahead_waits_for_all_that_may_have_changed(change: str) -> None:
    model, f, x, runner = ahead_of_changes()
    runner.may_go_ahead, state(f)._last = False, None  # as for rows at indices
    DROPPED[change](model)
    try:
        with contextlib.suppress(RuntimeError):
            f(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert Taped.launched == 1


def test_a_derived_tensor_may_be_a_parameter() -> None:
    weight = nn.Parameter(torch.randn(4))
    around = Surroundings((weight.t(), weight), recording.Held((weight,), ()))
    assert around.is_in_place(around.held)
    weight.data = torch.randn(4)
    assert not around.is_in_place(around.held)


@torch.no_grad()
def test_what_changes_often_is_recorded_less_and_less() -> None:
    model, f, x, _ = recorded()
    for _ in range(40):
        model.conv.weight.add_(1)
        for _ in range(3):
            f(x)
    assert Taped.made < 5
    for _ in range(4 * PAID):
        f(x)
    made = Taped.made
    model.conv.weight.add_(1)
    for _ in range(3):
        f(x)
    assert Taped.made == made + 1  # the last one paid


@torch.no_grad()
def test_a_program_that_is_slower_alone_leaves_calls_to_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, x, runner = recorded(alone=False)
    asked: list[int] = []
    own = nn.Conv2d.forward
    monkeypatch.setattr(nn.Conv2d, "forward", lambda self, x: asked.append(0) or own(self, x))
    for _ in range(5):
        f(x)
    assert len(asked) == 1 and replays(runner) == 3  # the second time the program is called, and recorded
    same(f, model, x)


@torch.no_grad()
def test_what_cannot_be_recorded_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(recording, "Recording", refuses)
    model, f, x, runner = recorded()
    for _ in range(4):
        same(f, model, x)
    assert runner.recorder is not None
    assert replays(runner) == 0
    assert runner.recorder.reason == "RuntimeError: operation not permitted when stream is capturing"


@torch.no_grad()
def test_a_failed_capture_is_the_last_of_its_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuses(*_: Any) -> None:
        asked.append(0)
        raise RuntimeError("no")

    monkeypatch.setattr(recording, "Recording", refuses)
    model, f, x, _ = recorded()
    for _ in range(6):
        same(f, model, x)
    assert len(asked) == 1


@torch.no_grad()
def test_memory_that_ran_out_may_be_there_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise torch.OutOfMemoryError

    model, f, x, runner = recorded()
    with monkeypatch.context() as patch:
        patch.setattr(recording, "Recording", refuses)
        for _ in range(4):
            same(f, model, x)
    for _ in range(8):
        same(f, model, x)
    assert replays(runner) > 0


@torch.no_grad()
def test_another_thread_does_not_wait() -> None:
    model, f, x, runner = recorded()
    for _ in range(3):
        f(x)
    assert runner.recorder is not None
    before = replays(runner)
    with runner.recorder._lock:
        done = threading.Thread(target=lambda: same(f, model, x))
        done.start()
        done.join(10)
        assert not done.is_alive()
    assert replays(runner) == before


@torch.no_grad()
def test_a_recording_that_has_no_turn_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, f, x, runner = recorded()
    for _ in range(3):
        f(x)
    with monkeypatch.context() as patch:
        patch.setattr(Taped, "__call__", lambda *_: ())  # another one's is on its way
        for _ in range(3):
            same(f, model, x)
    before = replays(runner)
    same(f, model, x)
    assert replays(runner) == before + 1 and Taped.made == 1


@torch.no_grad()
def test_whatever_a_capture_raises_the_call_has_its_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise TypeError

    monkeypatch.setattr(recording, "Recording", refuses)
    model, f, x, runner = recorded()
    for _ in range(4):
        same(f, model, x)
    assert runner.recorder is not None and "TypeError" in runner.recorder.reason


@torch.no_grad()
def test_nothing_of_a_left_state_is_kept() -> None:
    model, f, x, _ = recorded()
    for _ in range(3):
        f(x)
    old = weakref.ref(model.conv.weight)
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    for _ in range(3):
        f(x)
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("again", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))])
@torch.no_grad()
def test_copies_record_for_themselves(again: Any) -> None:
    model, f, x, _ = recorded()
    for _ in range(3):
        f(x)
    other = again(f)
    made = Taped.made
    model.conv.weight.zero_()
    want = other(x)
    for _ in range(3):
        torch.testing.assert_close(other(x), want)
    assert Taped.made == made + 1 and want.abs().sum() > 0


def test_graphs_need_a_gpu() -> None:
    with pytest.raises(fusewright.UnsupportedError, match="graphs='always' needs a model on a GPU"):
        fusewright.optimize(Net(), (torch.randn(2, 3, 8, 8),), graphs="always")
    with pytest.raises(fusewright.FusewrightError, match="graphs is 'yes'"):
        fusewright.optimize(Net(), (torch.randn(2, 3, 8, 8),), graphs="yes")  # type: ignore[arg-type]


def test_who_holds_the_lock_forgets() -> None:
    """A finalizer may call a module in the middle of its own replay."""
    model, f, x, runner = recorded()
    recorder = runner.recorder
    assert recorder is not None
    with torch.no_grad():
        for _ in range(3):
            f(x)
        with recorder._lock:
            recorder.forget()  # does not wait for itself
        assert recorder._recordings
        same(f, model, x)
    assert not recorder._recordings


REPEATABLE: list[tuple[Any, tuple[Tensor, ...], bool]] = [
    (lambda x: F.scaled_dot_product_attention(x, x, x), (torch.randn(2, 3, 4),), True),
    (lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5), (torch.randn(2, 3, 4),), False),
    (lambda x: torch.roll(x, 1) + 1, (torch.randn(4),), True),
    (lambda x: torch.bernoulli(x), (torch.rand(4),), False),
    (lambda x: torch.linalg.inv(x), (torch.eye(4),), False),
    (
        lambda x, m, v: torch.native_batch_norm(x, None, None, m, v, True, 0.1, 1e-5)[0],
        (torch.randn(2, 3, 4), torch.zeros(3), torch.ones(3)),
        False,
    ),
]


@pytest.mark.parametrize(("function", "given", "expected"), REPEATABLE)
def test_programs_that_may_be_recorded(function: Any, given: tuple[Tensor, ...], expected: bool) -> None:
    class Function(nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            result: Tensor = function(*tensors)
            return result

    assert pipeline.build(Function(), given, {}).program.repeatable == expected


FORKED = """
import os
from fusewright.runtime import recording

given_back = []
recording._Graph.__del__ = lambda graph: given_back.append(1)
graph = object.__new__(recording._Graph)
recording._graphs.add(graph)
child = os.fork()
del graph
if not child:
    os._exit(len(given_back))
assert os.waitpid(child, 0)[1] == 0 and given_back == [1] and not recording._inherited
"""


def test_a_forked_process_gives_nothing_back() -> None:
    """As compilers are forked that `torch.compile` starts: a device, and what was recorded there, is the other's."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
