"""Contraction groups with a tail per sample: in one launch by a cluster of blocks, and in two."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation.emulate import ORDERS, emulate
from torch import Tensor, nn

from fusewright.capture import capture
from fusewright.codegen.cuda import contraction as cuda
from fusewright.ir import ops
from fusewright.schedule import contraction, tiling
from fusewright.schedule.contraction import Contraction

TAILS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "logsumexp, linear, softmax": lambda y, linear: linear(y.logsumexp((2, 3))).softmax(1),
    "mean, linear, logsumexp": lambda y, linear: linear(y.relu().mean((2, 3))).logsumexp(1, keepdim=True),
    "all, then a sigmoid": lambda y, linear: y.logsumexp((1, 2, 3)).sigmoid(),
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.linear, self.tail = nn.Conv2d(3, 20, 3), nn.Linear(20, 7), TAILS[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.conv(x), self.linear)


@pytest.mark.parametrize("blocks", [None, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", TAILS)
@pytest.mark.sampled
def test_as_the_model(name: str, dtype: torch.dtype, blocks: int | None) -> None:
    model, x = Model(name).to(dtype).eval(), torch.randn(2, 3, 9, 14, dtype=dtype)
    graph = capture(model, (x,), {}).graph
    group = contraction.match(graph.outputs[0], graph.users())
    assert isinstance(group, Contraction) and group.tail is not None
    best = tiling.candidates(group, (1, 7, 12), tf32=False)[0]
    kernel = cuda.generate(group, best, "fused_test", "", tf32=False, blocks=blocks)
    assert len(kernel.launches) == (2 if blocks is None else 1)
    assert "out + (long long)sample * " in kernel.source  # many samples have more results than 32 bits count
    operands = [x if isinstance(n.op, ops.Input) else model.get_parameter(n.op.path).detach() for n in group.tensors]
    first, *others = (emulate(kernel, *operands, order=order) for order in ORDERS)
    assert all(torch.equal(first, other) for other in others)
    torch.testing.assert_close(first.double(), model.double()(x.double()), rtol=3e-6, atol=3e-6)
