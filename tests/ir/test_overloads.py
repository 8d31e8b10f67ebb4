"""What PyTorch says of an operation's results."""

from __future__ import annotations

import torch

from fusewright.ir.overloads import allocates


def test_memory_of_their_own() -> None:
    assert allocates(torch.ops.aten.add.Tensor)
    assert not allocates(torch.ops.aten.view.default)
    assert not allocates(torch.ops.aten.reshape.default)  # is made of others


def test_an_operation_that_the_dispatcher_does_not_have() -> None:
    """Traces of PyTorch 2.11 ask for sizes by it."""
    assert not allocates(torch.ops.aten.size.default)
