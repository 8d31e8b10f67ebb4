"""Convolutions of images whose channels lie last: PyTorch's values, and a library's where it passes NaN on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.testing import assert_close

from fusewright.runtime import conv_last as library
from fusewright.runtime.conv_last import Call, conv_last

HAS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def operands(device: str = "cpu", dtype: torch.dtype = torch.float32, k: int = 3, **changes: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    made = {
        "x": torch.randn(2, 9, 8, 16, dtype=dtype, device=device),
        "w": torch.randn(24, k, k, 16, dtype=dtype, device=device) / 8,
        "bias": torch.randn(24, dtype=dtype, device=device),
        "residual": None,
    }
    return made | changes


def eager(x: Tensor, w: Tensor, bias: Tensor | None, residual: Tensor | None, relu: bool, **how: Any) -> Tensor:
    y = F.conv2d(x.movedim(-1, 1), w.movedim(-1, 1), bias, **how).movedim(1, -1)
    y = y if residual is None else y + residual
    return torch.relu(y) if relu else y


WAYS: list[dict[str, Any]] = [{}, {"padding": 1}, {"stride": (2, 1), "padding": (1, 0), "dilation": 2}]


@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("relu", [True, False])
def test_values(how: dict[str, Any], relu: bool) -> None:
    given = operands()
    y = eager(**given, relu=relu, **how)
    for changes in ({}, {"bias": None}, {"residual": torch.randn_like(y)}, {"bias": None, "residual": y}):
        some = given | changes
        found = conv_last(some.pop("x"), some.pop("w"), **some, relu=relu, **how)
        assert found.is_contiguous()
        assert_close(found, eager(**given | changes, relu=relu, **how))


def test_one_and_three_dimensions_and_groups() -> None:
    x, w = torch.randn(2, 9, 8), torch.randn(4, 3, 8)
    assert_close(conv_last(x, w).mT, F.conv1d(x.mT, w.mT))
    x, w = torch.randn(2, 5, 4, 3, 8), torch.randn(4, 3, 2, 1, 4)
    want = F.conv3d(x.movedim(-1, 1), w.movedim(-1, 1), groups=2)
    assert_close(conv_last(x, w, groups=2).movedim(-1, 1), want)


def test_gradients() -> None:
    given = operands(dtype=torch.float64)
    given = {"x": given["x"][:, :3, :3, :4], "w": given["w"][:3, :, :, :4], "bias": given["bias"][:3]}
    leaves = [t.clone().requires_grad_() for t in (*given.values(), torch.randn(2, 1, 1, 3, dtype=torch.float64))]

    def call(x: Tensor, w: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        return conv_last(x, w, bias=bias, residual=residual, relu=True)

    assert torch.autograd.gradcheck(call, leaves)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A cuDNN that loses NaN, as it may where there is no residual, and a cuBLAS; how often they were asked."""
    times = {"cudnn": 0, "cublas": 0}

    def loses(call: Call) -> Tensor:
        times["cudnn"] += 1
        y = library._plain(call)
        return y if call.residual is not None else y.nan_to_num(0.0)

    def keeps(call: Call) -> Tensor:
        times["cublas"] += 1
        return library._plain(call)

    monkeypatch.setattr(library, "_by_cudnn", loses)
    monkeypatch.setattr(library, "_by_cublas", keeps)
    monkeypatch.setattr(library, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    yield times


def called(**given: Any) -> Call:
    x, w = given["x"].movedim(-1, 1), given["w"].movedim(-1, 1)
    return Call(x, w, given["bias"], given["residual"], *(given.get(name, n) for name, n in HOW.items()))


HOW = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}


def test_a_kernel_that_loses_nan_is_not_used(asked: dict[str, int]) -> None:
    assert library._way(called(**operands())) is library._plain
    assert library._way(called(**operands(k=1))) is library._by_cublas  # for one tap there is another
    assert library._way(called(**operands(k=1, stride=2))) is library._plain
    residual = torch.randn(2, 24, 7, 6)
    assert library._way(called(**operands(residual=residual))) is library._by_cudnn


@pytest.mark.parametrize(
    ("tf32", "channels", "expected"),
    [
        ((True, True), 256, True),
        ((False, False), 256, True),
        ((False, True), 16, False),  # would be rounded more
        ((True, False), 16, True),
        ((True, False), 256, False),  # would take longer
    ],
)
def test_a_product_is_as_exact(
    tf32: tuple[bool, bool], channels: int, expected: bool, asked: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_tf32", lambda: tf32)
    x, w = torch.randn(1, 2, 2, channels), torch.randn(8, 1, 1, channels)
    found = library._way(called(**operands(x=x, w=w, bias=torch.randn(8))))
    assert (found is library._by_cublas) == expected


def test_it_is_asked_once_for_every_kind_of_call(asked: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        library._way(called(**operands()))
    assert asked["cudnn"] == 1
    library._way(called(**operands(dtype=torch.float64)))
    library._way(called(**operands(padding=1)))
    assert asked["cudnn"] == 3
    monkeypatch.setattr(library, "_MOST", 3)
    library._way(called(**operands(padding=2)))
    assert len(library._known) == 1


def test_nobody_is_asked_in_a_capture(asked: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert library._way(called(**operands())) is library._plain
    assert not library._known and asked["cudnn"] == 0


def test_a_call_that_a_library_refuses_is_pytorch_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """As cuDNN's functions do on a CPU."""
    monkeypatch.setattr(library, "_known", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert library._way(called(**operands())) is library._plain


@HAS_GPU
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("added", [True, False])
def test_on_a_gpu(dtype: torch.dtype, k: int, how: dict[str, Any], added: bool) -> None:
    given = operands("cuda", dtype, k)
    wide = {name: None if t is None else t.double() for name, t in given.items()}
    if added:
        shape = eager(**wide, relu=True, **how).shape
        given["residual"] = torch.randn(shape, dtype=dtype, device="cuda")
        wide["residual"] = given["residual"].double()
    with torch.no_grad():
        x, w, *_ = given.values()
        rest = {"bias": given["bias"], "residual": given["residual"]}
        found, want = conv_last(x, w, **rest, relu=True, **how), eager(**wide, relu=True, **how)
        error, own = (y.double() - want for y in (found, eager(**given, relu=True, **how)))
        assert error.abs().max() <= 2 * own.abs().max() + 1e-6 and found.dtype == dtype
        x[0, 4, 4, 3], x[1, 2, 2, 0] = float("nan"), float("inf")
        given["bias"][1] = float("nan")
        spoilt = conv_last(x, w, **rest, relu=True, **how)
        assert torch.equal(spoilt.isnan(), eager(**given, relu=True, **how).isnan())
    ways = {way.__name__ for way in library._known.values()}
    assert ways - {"_plain"}  # a library has been found for some of them
