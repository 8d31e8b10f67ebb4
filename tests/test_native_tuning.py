"""Which groups become kernels on a CPU: measured there, remembered, and no slower than ATen."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fusewright
from fusewright import racing, tuning
from fusewright.capture import capture
from fusewright.ir import ops
from fusewright.ir.node import Graph
from fusewright.random_operands import random_operand
from fusewright.runtime import cache, compiler
from fusewright.runtime.native import NativeLauncher
from fusewright.schedule.groups import cut
from fusewright.tuning import Tuner

CPU = torch.device("cpu")


class Chain(nn.Module):
    """Pointwise operations and a sum over channels: five passes of ATen's, one of a kernel's."""

    def forward(self, x: Tensor) -> Tensor:
        return (torch.relu(x) * 0.5 + 1.0).square().sum(1)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))


def graph() -> Graph:
    return capture(Chain(), (torch.ones(4, 16, 64, 64),), {}).graph


def tuned(mode: tuning.Mode = "auto") -> Tuner:
    found = graph()
    tuner = Tuner(CPU, dict.fromkeys(found.symbols, 4), mode, (False, False))
    cut(found, tuner)
    return tuner


def test_measured_and_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = tuned().choices  # more than one where a busy machine had the whole chain lose: its parts are asked next
    for choice in choices:
        assert choice.tried == 1 and choice.generated is not None and choice.aten is not None
        assert choice.family == "stream" and choice.generated > 0 and choice.aten > 0
    monkeypatch.setattr(NativeLauncher, "__call__", lambda *_: pytest.fail("measured again"))
    assert choices and tuned().choices == choices


def test_the_random_stream_stays_where_it_is() -> None:
    before = torch.get_rng_state()
    assert tuned().choices[0].tried == 1
    assert torch.equal(before, torch.get_rng_state())


def test_another_number_of_threads_is_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned()
    calls: list[int] = []
    monkeypatch.setattr(racing, "seconds", lambda call, device, most=0.0: float(len(calls) or calls.append(1) or 1.0))
    tuned()
    assert not calls
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    tuned()
    assert calls


@pytest.mark.parametrize(("mode", "path"), [("auto", "ATen"), ("always", "generated")])
def test_a_slower_kernel_is_for_those_who_insist(mode: tuning.Mode, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    times = cycle([2.0, 1.0])  # the kernel's, ATen's
    monkeypatch.setattr(racing, "seconds", lambda call, device, most=0.0: next(times))
    tuner = tuned(mode)
    assert {choice.path for choice in tuner.choices} == {path} and len(tuner.kernels) == (path == "generated")


def test_a_kernel_that_does_not_compile_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "FLAGS", ("-fno-such-flag",))
    compiler._compiler.cache_clear()
    try:
        tuner = tuned()
    finally:
        compiler._compiler.cache_clear()
    assert {(choice.path, choice.tried) for choice in tuner.choices} == {("ATen", 0)} and not tuner.kernels


def test_kernels_are_made_by_default() -> None:
    """Through the public interface, at a size where they pay many times over."""
    x = torch.rand(4, 16, 128, 128)
    fast = fusewright.optimize(Chain(), (x,), verify=False, measure=False)
    (choice,) = fusewright.explain(fast).kernels
    assert choice.path == "generated"
    torch.testing.assert_close(fast(x), Chain()(x), rtol=1e-5, atol=1e-5)


def test_what_is_measured_is_an_ordinary_call() -> None:
    """Weights as layers begin with: sums of many would send functions of them the long way round."""
    graph = capture(nn.Conv2d(64, 8, 3), (torch.rand(2, 64, 9, 9),), {}).graph
    (conv,) = (n for n in graph.nodes() if isinstance(n.op, ops.Conv))
    x, w, bias = (random_operand(n, dict.fromkeys(graph.symbols, 2), CPU) for n in conv.inputs)
    assert x.min() >= 0 and bias.min() >= 0 and x.max() > 0.9
    assert w.min() < 0 < w.max() and w.abs().max() <= (64 * 9) ** -0.5
    assert nn.functional.conv2d(x, w, bias).abs().max() < 10
