"""Distributions and transformations of a call's arguments."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from fusewright.verification import inputs
from fusewright.verification.inputs import DISTRIBUTIONS, Call, copied
from fusewright.verification.numerics import OtherRoundings, RoundedResults, WideArithmetic, round_to_tf32, tf32_allowed


@pytest.fixture
def call() -> Call:
    torch.manual_seed(0)
    return Call.of(
        {"x": torch.randn(4, 3, 5, 6), "nest": [torch.arange(8).view(4, 2), 2.5], "scale": torch.tensor(1.0)}
    )


def x_of(call: Call) -> torch.Tensor:
    return call.kwargs["x"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_distributions_keep_form_and_are_finite(name: str, dtype: torch.dtype) -> None:
    call = Call.of((torch.zeros(50, 20, dtype=dtype), torch.arange(5)))
    x, index = inputs.drawn(call, name, 1).args
    assert x.dtype == dtype and x.shape == (50, 20) and bool(x.isfinite().all()) and bool(x.any())
    assert torch.equal(index, torch.arange(5))
    assert torch.equal(x, inputs.drawn(call, name, 1).args[0])


def test_distributions_are_what_they_are_called() -> None:
    call = Call.of(torch.zeros(400, 100))
    drawn = {name: inputs.drawn(call, name, 2).args[0] for name in DISTRIBUTIONS}
    means = {name: float(x.double().mean()) for name, x in drawn.items()}
    assert means["mean 10"] == pytest.approx(10, abs=0.1) and means["mean 1"] == pytest.approx(1, abs=0.1)
    assert 0 <= float(drawn["uniform"].min()) < 0.01 < 0.99 < float(drawn["uniform"].max()) <= 1
    assert float(drawn["negative"].max()) < 0 and drawn["constant"].unique().numel() == 1
    assert float(drawn["tiny"].abs().max()) < 1e-17 and float(drawn["large"].abs().max()) > 1e4
    assert float(drawn["high variance"].std()) > 3


def test_resizing_repeats_and_cuts_leading_rows_only(call: Call) -> None:
    more = call.resized(6)
    assert x_of(more).shape == (6, 3, 5, 6) and more.kwargs["nest"][0].shape == (6, 2) and more.batch() == 6
    assert torch.equal(x_of(more)[4], x_of(call)[0]) and more.kwargs["scale"].shape == ()
    assert x_of(call.resized(1)).shape[0] == 1 and x_of(call.resized(0)).shape[0] == 0


@pytest.mark.parametrize("transform", [inputs.transposed, inputs.strided, inputs.channels_last])
def test_layouts_change_strides_and_nothing_else(transform, call: Call) -> None:
    changed = transform(call)
    for a, b in zip(call.tensors(), changed.tensors(), strict=True):
        assert torch.equal(a, b)
    assert x_of(changed).stride() != x_of(call).stride()
    assert copied(x_of(changed)).stride() == x_of(changed).stride()


def test_copies_of_expanded_inputs_are_writable() -> None:
    x = torch.ones(3, 1).expand(3, 4)
    assert torch.equal(copied(x).mul_(2), torch.full((3, 4), 2.0)) and bool((x == 1).all())


def test_planted_values_are_where_the_name_says(call: Call) -> None:
    found = {where: variant for where, variant in inputs.planted(call, math.nan, 0) if where.startswith("input 0")}
    flat = {where.removeprefix("input 0, "): x_of(v).isnan().flatten() for where, v in found.items()}
    assert bool(flat["first"][0]) and bool(flat["last"][-1]) and int(flat["middle"].sum()) == 1
    assert int(flat["row"].sum()) == 6
    assert not bool(x_of(call).isnan().any())
    assert any(where.startswith("input 2") for where, _ in inputs.planted(call, math.nan, 0))
    assert not any(where.startswith("input 1") for where, _ in inputs.planted(call, math.nan, 0))


def test_permuted_integers_stay_in_range_and_nudges_are_rounding_sized(call: Call) -> None:
    shuffled = inputs.permuted(call, 0).kwargs["nest"][0]
    assert sorted(shuffled.flatten().tolist()) == list(range(8)) and not torch.equal(shuffled, call.kwargs["nest"][0])
    moved = (x_of(inputs.nudged(call, 0)) / x_of(call) - 1).abs()
    assert 0 < float(moved.max()) < 6 * torch.finfo(torch.float32).eps
    moved = (x_of(inputs.nudged(call, 0, tf32=True)) / x_of(call) - 1).abs()
    assert 2.0**-12 < float(moved.max()) <= 2.0**-10


def test_tf32_rounding_keeps_ten_bits() -> None:
    x = torch.randn(1000, dtype=torch.float64)
    error = (round_to_tf32(x) / x - 1).abs().max()
    assert 2.0**-12 < float(error) <= 2.0**-11 + 2.0**-23
    assert torch.equal(round_to_tf32(round_to_tf32(x)), round_to_tf32(x))
    assert math.isnan(float(round_to_tf32(torch.tensor(math.nan)))) and float(round_to_tf32(torch.tensor(math.inf))) > 1


def test_wide_arithmetic_undoes_hard_coded_casts_and_rounds_on_request() -> None:
    x, w = torch.randn(2, 3, 8, 8).double(), torch.randn(4, 3, 3, 3).double()
    with WideArithmetic() as mode:
        y = torch.conv2d(x.float(), w) + torch.zeros(1, dtype=torch.float32)
    assert y.dtype == torch.float64 and torch.equal(y, torch.conv2d(x, w)) and mode.bytes >= y.numel() * 8
    with WideArithmetic(convolutions=True):
        rounded = torch.conv2d(x, w)
    assert torch.allclose(rounded, torch.conv2d(round_to_tf32(x), round_to_tf32(w)), rtol=1e-12)
    with WideArithmetic(convolutions=True):
        assert torch.equal(x[0, 0] @ x[0, 1], torch.mm(x[0, 0], x[0, 1]))
    with WideArithmetic(matmuls=True):
        product = x[0, 0] @ x[0, 1]
    assert not torch.equal(product, x[0, 0] @ x[0, 1])


def test_other_roundings_are_the_same_numbers() -> None:
    x, w = torch.randn(2, 3, 40, 40).double(), torch.randn(8, 3, 5, 5).double().requires_grad_()
    linear = nn.Linear(8, 6).double()

    def run() -> list[Tensor]:
        y = linear(torch.conv2d(x, w).relu().mean((2, 3))).sum()
        return [y, *torch.autograd.grad(y, [w, *linear.parameters()])]

    want = run()
    with OtherRoundings():
        other = run()
    for a, b in zip(other, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert not torch.equal(other[0], want[0]) and not torch.equal(other[1], want[1])


def test_tf32_follows_the_user_s_flags_and_the_precision() -> None:
    assert tf32_allowed("eager") == (True, False)
    assert tf32_allowed("fp32") == (False, False) and tf32_allowed("tf32") == (True, True)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert tf32_allowed("eager") == (True, True)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def test_every_result_is_rounded_to_float32() -> None:
    """In place, behind views, and in backward passes as well."""
    x = torch.rand(3, 4, dtype=torch.float64, requires_grad=True)
    with RoundedResults():
        y = (x * 3).view(4, 3).t().expand(2, 3, 4)
        z = (y.exp() * 1.1).mul_(1 / 3)
        first, _ = torch.cat((z, z)).chunk(2)
        values, _ = first.sort()
        loss = torch.nn.functional.layer_norm(values, (4,)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
    assert x.grad is not None
    for result in (y, z, first, values, loss, x.grad):
        assert torch.equal(result, result.float().double()), result
    assert not torch.equal(x, x.detach().float().double())
