"""The verdict on honest candidates, on every planted fault, and what a verification leaves behind."""

from __future__ import annotations

import copy
import json
import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.errors import FusewrightError
from fusewright.verification import Verdict, verify


class ConvNet(nn.Module):
    """Convolution, batch norm, switches: running statistics and near-ties."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return self.head(x.mean((2, 3)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 7, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        return self.lstm(x)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        hidden = F.relu(self.head(self.embed(tokens))) * scale
        return {"hidden": hidden, "best": hidden.argmax(-1)}


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.linear(x), 0.3, self.training).sum(-1)


class Two(nn.Module):
    """Several inputs in a nest, several outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))

    def forward(self, pair: list[Tensor], *, flag: bool = True) -> tuple[Tensor, Tensor]:
        a, b = pair
        return a @ self.weight, (a * b if flag else a + b)


class HardCoded(nn.Module):
    """Names float32 in its forward, and so leaves float64 unless it is kept there."""

    def forward(self, x: Tensor) -> Tensor:
        return x.float().cumsum(-1) + torch.arange(x.shape[-1], dtype=torch.float32)


MODELS = {
    "conv": (ConvNet, lambda: (torch.randn(4, 3, 9, 9),)),
    "lstm": (Recurrent, lambda: (torch.randn(3, 4, 5),)),
    "tokens": (Tokens, lambda: {"tokens": torch.randint(11, (3, 7)), "scale": 0.5}),
    "dropout": (Dropping, lambda: (torch.randn(6, 8),)),
    "two": (Two, lambda: {"pair": [torch.randn(3, 4), torch.randn(3, 4)], "flag": True}),
    "hard-coded": (HardCoded, lambda: (torch.randn(3, 6),)),
}


def failed(verdict: Verdict) -> set[str]:
    return {row.name for row in verdict.failed}


def details(verdict: Verdict) -> str:
    return "\n".join(f"{row.name}: {row.ok} {row.detail}" for row in verdict.rows if not row.ok)


# -- honest candidates ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled
def test_model_agrees_with_itself(name: str, training: bool) -> None:
    torch.manual_seed(0)
    build, inputs = MODELS[name]
    model = build()
    verdict = verify(model, model, inputs(), training=training, exact=True)
    assert verdict.ok, details(verdict)


def test_copy_with_other_weights_is_given_the_reference_state() -> None:
    reference, candidate = ConvNet(), ConvNet()
    before = copy.deepcopy(candidate.state_dict())
    verdict = verify(reference, candidate, (torch.randn(4, 3, 9, 9),))
    assert verdict.ok, details(verdict)
    for key, value in candidate.state_dict().items():
        assert torch.equal(value, before[key]), key


class BoxThenConv(nn.Module):
    """conv -> average pool -> sum, for the reassociated version below."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(F.avg_pool2d(self.conv(x), 2)).sum((1, 2, 3))


class Reassociated(BoxThenConv):
    def forward(self, x: Tensor) -> Tensor:
        box = F.avg_pool2d(x.double(), 2, 1)
        pooled = F.conv2d(box, self.conv.weight.double(), self.conv.bias.double(), stride=2)
        return torch.sigmoid(pooled).sum((1, 2, 3)).float()


@pytest.mark.parametrize("mean", [0.0, 1.0, 10.0])
def test_reassociated_candidate_passes(mean: float) -> None:
    torch.manual_seed(0)
    verdict = verify(BoxThenConv(), Reassociated(), (torch.randn(4, 4, 14, 14) + mean,))
    assert verdict.ok, details(verdict)


class ReassociatedInFloat64(BoxThenConv):
    """What is exact enough of a float32 model is what a float64 model's truth is, too."""

    dtype = torch.float64

    def forward(self, x: Tensor) -> Tensor:
        box = F.avg_pool2d(x.to(self.dtype), 2, 1)
        pooled = F.conv2d(box, self.conv.weight.to(self.dtype), self.conv.bias.to(self.dtype), stride=2)
        return torch.sigmoid(pooled).sum((1, 2, 3)).double()


class InFloat32(ReassociatedInFloat64):
    dtype = torch.float32


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_float64_is_held_to_its_own_rounding(seed: int) -> None:
    torch.manual_seed(seed)
    x = torch.randn(2, 4, 94, 94).double()
    verdict = verify(BoxThenConv().double(), ReassociatedInFloat64().double(), (x,), seed=seed)
    assert verdict.ok, details(verdict)
    assert not verify(BoxThenConv().double(), InFloat32().double(), (x,), seed=seed).ok


class Means(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


class MeansInTwoSteps(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(1).mean(1)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled
def test_other_summation_order_passes_on_few_outputs_that_cancel(seed: int) -> None:
    # One output that nearly vanishes: eager's error on it alone is a matter of luck.
    torch.manual_seed(seed)
    x = torch.randn(1, 31, 33)
    verdict = verify(Means(), MeansInTwoSteps(), (x - x.mean(),), seed=seed)
    assert verdict.ok, details(verdict)


class Quantised(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (4, 4), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.float() * self.scale)


def test_whole_numbers_are_not_moved_as_real_ones_are() -> None:
    model = Quantised()
    verdict = verify(model, copy.deepcopy(model), (torch.randn(3, 4),))
    assert verdict.ok and next(row.ok for row in verdict.rows if row.name == "parameter update")


class NoBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, given: Tensor) -> Tensor:
        raise RuntimeError("backward can only be called in training mode")


class WithoutBackward(ConvNet):
    """As cuDNN's recurrent networks are in evaluation mode."""

    def forward(self, x: Tensor) -> Tensor:
        return NoBackward.apply(super().forward(x))


class WithoutBackwardAndLayouts(WithoutBackward):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.0 if x.is_contiguous() else 1.01)


def test_a_reference_without_gradients_is_verified_without() -> None:
    model, x = WithoutBackward().eval(), torch.randn(4, 3, 12, 12)
    verdict = verify(model, copy.deepcopy(model), (x,))
    results = {row.name: row.ok for row in verdict.rows}
    assert verdict.ok and results["gradients"] is None
    assert all(results[name] for name in ("determinism", "poisoned memory", "metadata", "inputs unmodified"))
    wrong = WithoutBackwardAndLayouts().eval()
    failed = {row.name for row in verify(model, wrong, (x,)).rows if row.ok is False}
    assert failed and all("last" in name or "stride" in name or "transposed" in name for name in failed), failed


class Switches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x.sum(-1) * (1 / 3))


class SwitchesReordered(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(sum(x.flip(-1).unbind(-1)) * (1 / 3))


def test_near_ties_are_excluded_and_counted() -> None:
    torch.manual_seed(0)
    x, noise = torch.randn(400, 24), torch.randn(4000, 24)
    # Rows whose sum is rounding noise: its sign, and so relu's gradient, depends on the order of summation.
    noise[:, -1] -= noise.double().sum(-1).float()
    x[:2] = noise[(SwitchesReordered()(noise) > 0) != (noise.double().sum(-1) > 0)][:2]
    verdict = verify(Switches(), SwitchesReordered(), (x,))
    assert verdict.ok, details(verdict)
    assert "near-ties excluded" in next(row.detail for row in verdict.rows if row.name == "gradients")


class SwitchesWrong(Switches):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.cat([x[:-1], WrongGradient.apply(x[-1:], 1.001)]))


def test_near_ties_do_not_hide_a_wrong_gradient() -> None:
    torch.manual_seed(0)
    x, noise = torch.rand(400, 24), torch.randn(4000, 24)
    noise[:, -1] -= noise.double().sum(-1).float()
    # Eager itself falls on the other side than float64 does.
    x[:2] = noise[(Switches()(noise) > 0) != (noise.double().sum(-1) > 0)][:2]
    assert "gradients" in failed(verify(Switches(), SwitchesWrong(), (x,)))


class Vanishing(nn.Module):
    """A tiny number, or 0, times one that is infinite in float32."""

    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.of((a + b) + c)

    def of(self, exponent: Tensor) -> Tensor:
        return exponent.exp() * ((-exponent).exp() * 2)


class VanishingRounded(Vanishing):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return self.of(a + (b + c))


class VanishingWithoutNaN(Vanishing):
    def forward(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return super().forward(a, b, c).nan_to_num(nan=torch.inf, posinf=torch.inf)


def test_overflows_of_eagers_are_no_planted_nan() -> None:
    """Whether the tiny number is 0, and infinitely many of it are NaN, is a matter of rounding."""
    torch.manual_seed(0)
    a, c = -20 - 20 * torch.rand(2, 8, 64)
    exponents = torch.linspace(-104.5, -87.0, 2**22)
    least = exponents[exponents.exp() > 0][0].item()  # below which an exponential is 0
    given = a, (least - 3e-6 - a.double() - c.double()).float(), c  # rounded to either side of it
    eager, other = Vanishing()(*given), VanishingRounded()(*given)
    assert (eager.isnan() & ~other.isnan()).any() and (other.isnan() & ~eager.isnan()).any()
    verdict = verify(Vanishing(), VanishingRounded(), given)
    assert verdict.ok, details(verdict)
    assert "nan" in failed(verify(Vanishing(), VanishingWithoutNaN(), given))


class Growing(nn.Module):
    """e^a e^-a of a running sum: 128 times ln 2, so that rounding decides whether e^a, 2^128, is the greatest number or
    infinite."""

    def total(self, x: Tensor) -> Tensor:
        return torch.cumsum(nn.functional.softplus(x), 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.total(x)
        return torch.exp(a) * torch.exp(-a)


class GrowingRoundedDown(Growing):
    def total(self, x: Tensor) -> Tensor:
        a = super().total(x)
        return a * (1 - 2**-22) if a.dtype == torch.float32 else a


class GrowingTooFar(Growing):
    def total(self, x: Tensor) -> Tensor:
        a = super().total(x)
        return torch.where(a > 88, 2 * a, a)


def test_overflows_of_exactly_rounded_operations_are_right() -> None:
    """Tiny x make ln 2 of softplus, whatever the noise, so that eager is always lucky, or never."""
    given = (1e-19 * torch.rand(2, 128),)
    eager, other = GrowingRoundedDown()(*given), Growing()(*given)
    assert eager.isfinite().all() and other[:, 127].isinf().all() and other[:, :127].isfinite().all()
    verdict = verify(GrowingRoundedDown(), Growing(), given, gradients=False)
    assert verdict.ok, details(verdict)
    assert "example" in failed(verify(GrowingRoundedDown(), GrowingTooFar(), given, gradients=False))


# -- planted faults ---------------------------------------------------------------------------------------------------


class Elementwise(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + 1


class OneWrongElement(Elementwise):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        wrong = torch.zeros_like(y).flatten()
        wrong[wrong.numel() // 3] = 100 * torch.finfo(y.dtype).eps * float(y.detach().square().mean().sqrt())
        return y + wrong.view_as(y)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_wrong_element_in_a_million_at_100_ulp_is_caught(dtype: torch.dtype) -> None:
    x = torch.rand(1000, 1000, dtype=dtype)
    assert "example" in failed(verify(Elementwise(), OneWrongElement(), (x,), seconds=0, gradients=False))
    assert verify(Elementwise(), Elementwise(), (x,), seconds=0, gradients=False).ok


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class WrongBiasGradient(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.linear(x.mean((2, 3)), self.head.weight, WrongGradient.apply(self.head.bias, 1.0001))


class DroppedGradient(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        return F.linear(x.mean((2, 3)), self.head.weight, self.head.bias.detach())


class StatisticsForgotten(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(self.conv(x), None, None, self.norm.weight, self.norm.bias, True)
        return self.head(F.max_pool2d(F.relu(x), 2).mean((2, 3)))


class CounterForgotten(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.norm.num_batches_tracked.sub_(1)
        return y


class WritesToInput(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(1.5)
        return y


class CachedOutput(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not hasattr(self, "cache") or self.cache.shape != y.shape:
            self.cache = torch.empty_like(y)
        self.cache.detach_().copy_(y)
        return self.cache


class FrozenWeight(ConvNet):
    """Derives a weight once and never looks again."""

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "doubled"):
            self.doubled = (self.head.weight * 2).detach()
        x = F.max_pool2d(F.relu(self.norm(self.conv(x))), 2)
        weight = self.head.weight if torch.is_grad_enabled() else self.doubled / 2
        return F.linear(x.mean((2, 3)), weight, self.head.bias)


class WrongAtOtherBatch(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y if x.shape[0] == 4 else y * 1.01


class RefusesBatchOne(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] == 1:
            raise RuntimeError("made for larger batches")
        return super().forward(x)


class WrongDtype(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).double()


class WrongShape(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[:, None]


class WrongStrides(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).t().contiguous().t()


class Detached(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).detach()


class Sloppy(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        h = F.conv2d(x.half(), self.conv.weight.half(), self.conv.bias.half()).float()
        return self.head(F.max_pool2d(F.relu(self.norm(h)), 2).mean((2, 3)))


class Swallows(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.where(x.isnan(), torch.zeros_like(x), x))


class NonDeterministic(ConvNet):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        NonDeterministic.calls += 1
        return super().forward(x) * (1 + 2e-7 * (NonDeterministic.calls % 2))


class TrustsStorage(ConvNet):
    """Reads the input as if it were contiguous."""

    def forward(self, x: Tensor) -> Tensor:
        size = x.numel()
        if x.untyped_storage().size() >= size * x.element_size():
            x = torch.as_strided(x, x.shape, torch.empty(x.shape, device="meta").stride())
        return super().forward(x)


class ReadsNewMemory(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.empty_like(y).mul_(0)


class SlipsOnNegative(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 1.001 if bool((x < 0).all()) else y


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = ConvNet()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


FAULTS = {
    WrongBiasGradient: "gradients",
    DroppedGradient: "gradients",
    StatisticsForgotten: "buffers",
    CounterForgotten: "buffers",
    WritesToInput: "inputs unmodified",
    CachedOutput: "outputs kept",
    FrozenWeight: "parameter update",
    WrongAtOtherBatch: "batch + 1",
    RefusesBatchOne: "batch 1",
    WrongDtype: "metadata",
    WrongShape: "metadata",
    WrongStrides: "metadata",
    Detached: "metadata",
    Sloppy: "example",
    NonDeterministic: "determinism",
    TrustsStorage: "transposed storage",
    SlipsOnNegative: "negative",
    Renamed: "state_dict",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda c: c.__name__)
@pytest.mark.sampled
def test_planted_fault_is_caught_by_its_check(fault: type[nn.Module]) -> None:
    torch.manual_seed(0)
    verdict = verify(ConvNet(), fault(), (torch.randn(4, 3, 9, 9),))
    assert not verdict.ok
    assert FAULTS[fault] in failed(verdict), details(verdict)


@pytest.mark.parametrize("fault", [TrustsStorage, CachedOutput, NonDeterministic])
def test_faults_of_one_kind_fail_only_their_own_checks(fault: type[nn.Module]) -> None:
    allowed = {
        TrustsStorage: {"transposed storage", "strided storage", "channels-last"},
        CachedOutput: {"outputs kept", "metadata", "gradients"},
        NonDeterministic: {"determinism"},
    }
    verdict = verify(ConvNet(), fault(), (torch.randn(4, 3, 9, 9),), training=False, gradients=False)
    assert failed(verdict) <= allowed[fault], details(verdict)


def test_swallowed_nan_is_caught() -> None:
    assert failed(verify(ConvNet(), Swallows(), (torch.randn(4, 3, 9, 9),), training=False)) == {"nan"}


def test_read_of_new_memory_is_caught() -> None:
    assert "poisoned memory" in failed(verify(ConvNet(), ReadsNewMemory(), (torch.randn(4, 3, 9, 9),), training=False))


class Spreads(Elementwise):
    """A NaN anywhere spoils the whole row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0 * x.sum(-1, keepdim=True)


def test_invented_nan_is_caught() -> None:
    x = torch.randn(5, 6)
    assert "nan" in failed(verify(Elementwise(), Spreads(), (x,)))
    assert "inf" in failed(verify(Elementwise(), Spreads(), (x,), exact=True))
    assert "inf" not in failed(verify(Elementwise(), Spreads(), (x,)))


class Twisted(Two):
    def forward(self, pair: list[Tensor], *, flag: bool = True) -> tuple[Tensor, Tensor]:
        a, b = super().forward(pair, flag=flag)
        return b, a


class WrongSecond(Two):
    def forward(self, pair: list[Tensor], *, flag: bool = True) -> tuple[Tensor, Tensor]:
        a, b = super().forward(pair, flag=flag)
        return a, b * 1.0001


@pytest.mark.parametrize("fault", [Twisted, WrongSecond])
def test_every_output_is_compared(fault: type[nn.Module]) -> None:
    inputs = {"pair": [torch.randn(3, 4), torch.randn(3, 4)]}
    assert "example" in failed(verify(Two(), fault(), inputs))


ELSEWHERE = nn.Parameter(torch.tensor(1.5))


class TrainsElsewhere(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * ELSEWHERE


class ForgetsElsewhere(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * ELSEWHERE.detach()


def test_lost_gradient_of_what_is_no_parameter_is_caught() -> None:
    """`torch.export` takes what is neither an attribute nor passed for a constant."""
    x = torch.randn(4, 3, 9, 9)
    assert verify(TrainsElsewhere(), TrainsElsewhere(), (x,)).ok
    verdict = verify(TrainsElsewhere(), ForgetsElsewhere(), (x,))
    assert failed(verdict) == {"metadata"}
    assert r"a trainable tensor of shape () that is no parameter of the model gets no gradient" in details(verdict)


class TrainsAttribute(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.scales = [torch.tensor(1.5, requires_grad=True)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scales[0]


class MakesLeaf(ConvNet):
    """As models of energies and forces do, whose gradients are outputs."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.zeros_like(x, requires_grad=True))


class Halved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.variable = "any"
        return x / 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad / 2


class HalvesItself(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        halved: Tensor = Halved.apply(super().forward(x))
        return halved


class Halves(ConvNet):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / 2


@pytest.mark.parametrize(
    ("reference", "candidate"),
    [(TrainsAttribute,) * 2, (MakesLeaf,) * 2, (MakesLeaf, ConvNet), (HalvesItself, Halves)],
)
def test_leaves_of_copies_and_of_calls_are_not_lost(reference: type[ConvNet], candidate: type[ConvNet]) -> None:
    verdict = verify(reference(), candidate(), (torch.randn(4, 3, 9, 9),))
    assert verdict.ok, verdict


class WrongIndex(Tokens):
    def forward(self, tokens: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        out = super().forward(tokens, scale)
        return {**out, "best": out["best"].roll(1)}


def test_wrong_integers_are_caught() -> None:
    torch.manual_seed(0)
    assert "example" in failed(verify(Tokens(), WrongIndex(), (torch.randint(11, (3, 7)),)))


class WrongMask(Dropping):
    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        return super().forward(x)


def test_dropout_from_another_stream_position_is_caught() -> None:
    assert "example" in failed(verify(Dropping(), WrongMask(), (torch.randn(6, 8),)))


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)


class NoisyWrong(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + torch.randn_like(x) * 1.001


def test_eager_is_the_truth_where_float64_draws_other_numbers() -> None:
    x = torch.randn(8, 8)
    verdict = verify(Noisy(), Noisy(), (x,))
    assert verdict.ok, details(verdict)
    assert "random numbers" in verdict.checked
    assert "example" in failed(verify(Noisy(), NoisyWrong(), (x,)))


# -- budget, state, form ----------------------------------------------------------------------------------------------


def test_model_and_generators_are_left_as_found() -> None:
    torch.manual_seed(3)
    model, twin = ConvNet(), ConvNet()
    model.norm.eval()
    model.head.bias.requires_grad_(False)
    twin.head.bias.requires_grad_(False)
    model.conv.weight.grad = torch.ones_like(model.conv.weight)
    grad = model.conv.weight.grad
    state, flags = copy.deepcopy(model.state_dict()), [m.training for m in model.modules()]
    torch.manual_seed(5)
    random.seed(5)
    x = torch.randn(4, 3, 9, 9)
    stream, python_stream, bits = torch.get_rng_state(), random.getstate(), x.clone()
    verify(model, twin, (x,), training=False)
    assert torch.equal(torch.get_rng_state(), stream) and random.getstate() == python_stream
    assert [m.training for m in model.modules()] == flags
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.conv.weight.grad is grad and bool((grad == 1).all())
    assert not model.head.bias.requires_grad
    assert torch.equal(x, bits) and not torch.are_deterministic_algorithms_enabled()


def test_time_budget_skips_all_but_the_core() -> None:
    verdict = verify(ConvNet(), ConvNet(), (torch.randn(4, 3, 9, 9),), seconds=0)
    assert {row.name for row in verdict.rows if row.ok} == {"state_dict", "example", "gradients"}
    assert all("allowed were over" in row.detail for row in verdict.rows if row.ok is None)


def test_memory_budget_cuts_the_batch_and_says_so() -> None:
    x = torch.randn(64, 3, 9, 9)
    verdict = verify(ConvNet(), ConvNet(), (x,), max_bytes=2_000_000)
    rows = {row.name: row for row in verdict.rows}
    assert verdict.ok, details(verdict)
    assert "of 64" in rows["example"].detail and "batch 64 of 64" not in verdict.checked
    assert rows["full size"].ok


def test_wrong_only_at_full_size_is_caught() -> None:
    class WrongWhenLarge(ConvNet):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.01 if x.shape[0] == 64 else 1.0)

    x = torch.randn(64, 3, 9, 9)
    assert failed(verify(ConvNet(), WrongWhenLarge(), (x,), max_bytes=2_000_000)) == {"full size"}


def test_running_out_of_memory_halves_the_batch() -> None:
    class Hungry(ConvNet):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 4:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
            return super().forward(x)

    verdict = verify(ConvNet(), Hungry(), (torch.randn(16, 3, 9, 9),))
    assert verdict.ok, details(verdict)
    rows = {row.name: row for row in verdict.rows}
    assert rows["example"].detail == "batch 4 of 16" and rows["full size"].ok is None


def test_reference_that_fails_on_its_own_example_is_no_success() -> None:
    verdict = verify(ConvNet(), ConvNet(), (torch.randn(4, 5, 9, 9),))
    assert not verdict.ok and "reference itself raises" in verdict.rows[0].detail


def test_verdict_is_json() -> None:
    torch.manual_seed(0)
    verdict = verify(ConvNet(), Swallows(), (torch.randn(4, 3, 9, 9),), training=False, seconds=5)
    record = json.loads(verdict.to_json())
    assert record["ok"] is False
    assert {"name", "ok", "detail", "error", "tolerance"} == set(record["rows"][0])


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(FusewrightError, match="precision"):
        verify(ConvNet(), ConvNet(), (torch.randn(4, 3, 9, 9),), precision="bf16")
    with pytest.raises(FusewrightError, match="example_inputs"):
        verify(ConvNet(), ConvNet(), 3)
