"""Every claim in the table, checked on the values PyTorch computes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from fusewright.ir import pointwise
from fusewright.ir.pointwise import Traits

inf, nan = math.inf, math.nan

PARAMS = {
    "hardtanh": [(), (-2, 3), (-0.1, 0.3)],
    "clamp": [(-1.0, 1.0), (0.25, inf), (-inf, -0.1), (2.0, 1.0), (0, 3), (nan, 1.0)],
    "clamp_min": [(0.0,), (-1.5,), (2,), (-inf,), (nan,)],
    "clamp_max": [(0.0,), (1.5,), (-2,), (inf,)],
    "leaky_relu": [(), (0.0,), (0.3,), (-0.2,), (1.5,)],
    "threshold": [(0.0, 0.0), (1.0, -2.0), (1.0, 2.0), (-1.0, -1.0), (-1.0, -3)],
    "hardshrink": [(), (0.0,), (1.25,)],
    "softshrink": [(), (0.0,), (1.25,)],
    "softplus": [(), (2.0, 20.0), (0.3, 25.0), (1.0, 2.0), (-1.0, 20.0)],
    "elu": [(), (0.5,), (0.0,), (-1.0,), (2.0, 3.0, 0.5), (1.0, -1.0, 1.0), (1.0, 1.0, -1.0)],
    "celu": [(), (0.5,), (3.0,), (-1.0,)],
    "gelu": [(), ("tanh",)],
    "round_to": [(1,), (3,), (0,), (-1,)],
    "pow": [
        (1,),
        (2,),
        (3,),
        (4,),
        (5,),
        (2.0,),
        (3.0,),
        (0.5,),
        (0.25,),
        (0.75,),
        (1.25,),
        (1.5,),
        (1.75,),
        (-0.25,),
        (-0.75,),
        (0,),
        (0.0,),
        (-1,),
        (-2,),
        (-0.5,),
        (inf,),
    ],
}
UNARY = [
    (fn, params)
    for fn in pointwise.functions()
    for params in PARAMS.get(fn, [()])
    if pointwise.traits(fn, params).arity == 1
]
every_function = pytest.mark.parametrize(("fn", "params"), UNARY, ids=lambda v: str(v))

SMALL = torch.tensor([5e-324, 1e-310, 1e-300, 1e-160, 1e-50, 1e-30, 1e-16, 1e-8], dtype=torch.float64)


def apply(traits: Traits, *args: torch.Tensor) -> torch.Tensor:
    names = {f"v{i}": a for i, a in enumerate(args)}
    return eval(traits.torch.format(*names), {"torch": torch, "F": F, **names})


def sample(low: float = -inf, high: float = inf) -> torch.Tensor:
    """Ascending float64 values of [low, high]: dense near zero, sparse far out, with the ends and infinities."""
    sizes = torch.cat(
        [
            SMALL,
            torch.linspace(1e-6, 30, 40_001, dtype=torch.float64),
            torch.logspace(1.5, 300, 4000, dtype=torch.float64),
        ]
    )
    ends = torch.tensor([low, high, 0.0, inf, -inf, *(range(-20, 21))], dtype=torch.float64)
    values = torch.cat([sizes, -sizes, ends])
    return within(values, low, high).sort().values


def within(values: torch.Tensor, low: float, high: float) -> torch.Tensor:
    wide = values.double()  # the bounds may lie below float32's least value
    return values[(wide >= low) & (wide <= high)]


def strides(low: float, high: float, dense: bool) -> list[torch.Tensor]:
    """Runs of adjacent float32 values in ascending order, of [low, high]; -0.0 comes before 0.0."""
    top = 0x7F800000  # the bits of inf
    runs = [range(0, 60_000), range(0x00800000 - 30_000, 0x00800000 + 30_000), range(top - 60_000, top + 1)]
    centres = (1e-6, 1e-3, 0.1, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0, 3.0, 6.0, 9.0, 17.0, 20.0, 88.0, 104.0, 1e10, 1e30)
    width = 120_000 if dense else 10_000
    for c in centres:
        middle = int(torch.tensor(c).view(torch.int32))
        runs.append(range(middle - width, middle + width))
    result = []
    for run in runs:
        values = torch.arange(run.start, run.stop, dtype=torch.int32).view(torch.float32)
        for part in (values, -values.flip(0)):
            kept = within(part, low, high)
            if len(kept):
                result.append(kept)
    seam = torch.tensor([-inf, -1.0, -1e-45, -0.0, 0.0, 1e-45, 1.0, inf])
    result.append(within(seam, low, high))
    # one sweep over everything, at a stride that meets every exponent and thousands of mantissas
    sweep = torch.arange(0, top + 1, 4093 if dense else 65521, dtype=torch.int32).view(torch.float32)
    both = torch.cat([-sweep.flip(0), sweep])
    result.append(within(both, low, high))
    return result


@every_function
def test_monotone_on_its_domain(fn, params):
    traits = pointwise.traits(fn, params)
    if traits.monotone is None:
        return
    x = sample(*traits.domain)
    y = apply(traits, x)
    y = y[~torch.isnan(y)] if traits.limits and any(map(math.isnan, traits.limits)) else y
    assert not torch.isnan(y).any()
    steps = torch.nan_to_num(torch.diff(y), nan=0.0)  # inf - inf
    slack = 1e-9 * torch.minimum(y[1:].abs(), y[:-1].abs()).clamp(min=1e-12)
    ordered = steps >= -slack if traits.monotone == "up" else steps <= slack
    assert bool(ordered.all()), (x[1:][~ordered], steps[~ordered])


@every_function
def test_what_is_not_claimed_monotone_is_not(fn, params):
    traits = pointwise.traits(fn, params)
    if traits.monotone is not None or fn in ("clamp", "clamp_min", "logical_not"):
        return
    y = apply(traits, torch.linspace(-12, 12, 4001, dtype=torch.float64))
    steps = torch.diff(y[~torch.isnan(y)])
    constant = bool((steps == 0).all())
    # a celu or an elu of negative parameters, a steep softplus and the powers of zero are left out for simplicity
    assert constant or fn in ("elu", "celu", "softplus", "pow") or (bool((steps > 0).any()) and bool((steps < 0).any()))


@every_function
def test_float_monotone_bit_for_bit(fn, params):
    traits = pointwise.traits(fn, params)
    if not traits.float_monotone:
        return
    dense = params == PARAMS.get(fn, [()])[0]
    for x in strides(*traits.domain, dense):
        y = apply(traits, x)
        later, earlier = (y[1:], y[:-1]) if traits.monotone == "up" else (y[:-1], y[1:])
        broken = later < earlier
        assert not broken.any(), x[1:][broken]
        undefined = x[torch.isnan(y)]
        assert all(abs(v) == inf for v in undefined.tolist()) and (not len(undefined) or nan_limit(traits, undefined))
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
        x = within(x, *traits.domain).sort().values
        steps = apply(traits, x)
        steps = steps[~torch.isnan(steps)]
        ordered = steps[1:] >= steps[:-1] if traits.monotone == "up" else steps[1:] <= steps[:-1]
        assert bool(ordered.all())


def nan_limit(traits: Traits, undefined: torch.Tensor) -> bool:
    assert traits.limits is not None
    return all(math.isnan(traits.limits[0 if v < 0 else 1]) for v in undefined.tolist())


@every_function
@pytest.mark.parametrize("length", [1, 67])
def test_nan(fn, params, length):
    """The scalar tail and the vector body of a kernel agree."""
    traits = pointwise.traits(fn, params)
    y = apply(traits, torch.full((length,), nan))
    assert bool((y != y).all()) if traits.nan_to_nan else not bool((y != y).any())


@every_function
def test_limits(fn, params):
    traits = pointwise.traits(fn, params)
    for dtype in (torch.float32, torch.float64):
        y = apply(traits, torch.tensor([-inf, inf] * 20, dtype=dtype))[:2]
        inside = [traits.domain[0] == -inf, traits.domain[1] == inf]
        if traits.limits is not None:
            expected = torch.tensor(traits.limits, dtype=dtype)
            torch.testing.assert_close(y[inside], expected[inside], rtol=1e-6, atol=0, equal_nan=True)
        else:
            assert traits.monotone != "up" or fn == "elu"


@every_function
def test_range(fn, params):
    traits = pointwise.traits(fn, params)
    low, high = traits.range
    for x in (sample(), sample().to(torch.float32)):
        y = apply(traits, x).to(torch.float64)
        y = y[~torch.isnan(y)]
        eps = torch.finfo(x.dtype).eps
        assert float(y.min()) >= low - abs(low) * eps if math.isfinite(low) else True
        assert float(y.max()) <= high + abs(high) * eps if math.isfinite(high) else True


@every_function
def test_parity(fn, params):
    traits = pointwise.traits(fn, params)
    x = sample()
    y, mirrored = apply(traits, x), apply(traits, -x)
    if traits.parity == "odd":
        torch.testing.assert_close(mirrored, -y, equal_nan=True, rtol=1e-12, atol=0)
    if traits.parity == "even":
        torch.testing.assert_close(mirrored, y, equal_nan=True, rtol=1e-12, atol=0)


@every_function
def test_idempotent_bit_for_bit(fn, params):
    traits = pointwise.traits(fn, params)
    if traits.idempotent:
        for x in (sample(), sample().float(), torch.tensor([-0.0, 0.0, nan] * 11)):
            y = apply(traits, x)
            again = apply(traits, y)
            assert torch.equal(torch.signbit(again), torch.signbit(y)) and torch.equal(again[y == y], y[y == y])
            assert torch.equal(torch.isnan(again), torch.isnan(y))


@every_function
def test_at_zero(fn, params):
    traits = pointwise.traits(fn, params)
    if traits.at_zero is not None:
        torch.testing.assert_close(
            float(apply(traits, torch.tensor([0.0], dtype=torch.float64))), traits.at_zero, rtol=1e-12, atol=0
        )


PEERS = {
    ("relu6", ()): F.relu6,
    ("hardtanh", (-2, 3)): lambda x: F.hardtanh(x, -2, 3),
    ("clamp", (-1.0, 1.0)): lambda x: torch.clamp(x, -1, 1),
    ("clamp_min", (-1.5,)): lambda x: torch.clamp(x, min=-1.5),
    ("clamp_max", (-2,)): lambda x: torch.clamp(x, max=-2),
    ("leaky_relu", (0.3,)): torch.nn.LeakyReLU(0.3),
    ("threshold", (1.0, -2.0)): torch.nn.Threshold(1.0, -2.0),
    ("softplus", (2.0, 20.0)): torch.nn.Softplus(2.0),
    ("elu", (0.5,)): torch.nn.ELU(0.5),
    ("elu", (2.0, 3.0, 0.5)): lambda x: torch.where(x > 0, 3 * x, 6 * torch.expm1(0.5 * x)),
    ("celu", (3.0,)): torch.nn.CELU(3.0),
    ("selu", ()): torch.nn.SELU(),
    ("gelu", ()): torch.nn.GELU(),
    ("gelu", ("tanh",)): torch.nn.GELU("tanh"),
    ("log_sigmoid", ()): torch.nn.LogSigmoid(),
    ("hardshrink", (1.25,)): torch.nn.Hardshrink(1.25),
    ("softshrink", (1.25,)): torch.nn.Softshrink(1.25),
    ("pow", (1.5,)): lambda x: x**1.5,
    ("neg", ()): torch.neg,
}


@every_function
def test_text_is_the_function(fn, params):
    x = torch.linspace(-3, 3, 101, dtype=torch.float64)
    traits = pointwise.traits(fn, params)
    default = getattr(torch, fn, None) or getattr(F, fn, None)
    peer = PEERS.get((fn, params), default if not params else None)
    if peer is not None:
        torch.testing.assert_close(apply(traits, x), peer(x), equal_nan=True, rtol=1e-14, atol=1e-15)


BINARY = [
    fn
    for fn in pointwise.functions()
    if fn not in PARAMS and pointwise.traits(fn).arity == 2 and pointwise.traits(fn).admits is None
]


# Those that PyTorch has under another name.
OTHER_NAMES = {
    "at_least": torch.clamp_min,
    "at_most": torch.clamp_max,
    "power": torch.pow,
    "trunc_divide": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
}


@pytest.mark.parametrize("fn", BINARY)
def test_binary_text_is_the_function(fn):
    x = torch.tensor([0.5, nan, inf, nan, 1.0, nan, 1.0, -2.0, 3.0])
    y = torch.tensor([nan, 2.0, nan, inf, nan, 0.0, 1.0, 3.0, -1.0])
    result, peer = apply(pointwise.traits(fn), x, y), OTHER_NAMES.get(fn) or getattr(torch, fn)
    assert torch.equal(torch.nan_to_num(result.float()), torch.nan_to_num(peer(x, y).float()))
    assert pointwise.traits(fn).nan_to_nan == bool(torch.isnan(result[:6].float()).all())


@pytest.mark.parametrize(("fn", "peer"), [("between", torch.clamp), ("lerp", torch.lerp)])
def test_ternary_text_is_the_function(fn, peer):
    one = torch.tensor([-1.0, 0.25, 2.0, nan])
    args = [a.flatten() for a in torch.meshgrid(one, one, one, indexing="ij")]
    result = apply(pointwise.traits(fn), *args)
    assert torch.equal(torch.nan_to_num(result), torch.nan_to_num(peer(*args)))
    assert pointwise.traits(fn).nan_to_nan == bool(torch.isnan(result[sum(args).isnan()]).all())


REFUSING = [fn for fn in pointwise.functions() if fn not in PARAMS and pointwise.traits(fn).admits is not None]


@pytest.mark.parametrize("fn", REFUSING)
def test_what_a_function_admits(fn):
    """Eager answers for all operands at both ends, and for none beyond them."""
    traits = pointwise.traits(fn)
    assert traits.admits is not None and traits.arity == 2
    low, high = traits.admits
    inside = torch.tensor([low, high], dtype=torch.float64)
    assert apply(traits, inside, inside.flip(0)).isfinite().all()
    for beyond in (math.nextafter(low, -inf), math.nextafter(high, inf), nan, inf):
        for operands in ((beyond, high), (low, beyond)):
            with pytest.raises(RuntimeError):
                apply(traits, *(torch.tensor([n], dtype=torch.float64) for n in operands))


def test_likelihoods_of_a_binary_class():
    """Operands broadcast, which those of PyTorch's function do not, and have its gradients, where it saturates too."""
    x, t = torch.tensor([[0.0], [1e-30], [0.3], [1.0]], requires_grad=True), torch.tensor([0.0, 0.4, 0.9, 1.0])
    wide = x.detach().expand(4, 4).clone().requires_grad_()
    y = apply(pointwise.traits("binary_cross_entropy"), x, t)
    peer = F.binary_cross_entropy(wide, t.repeat(4, 1), reduction="none")
    assert torch.equal(y, peer) and y.shape == (4, 4)
    y.sum().backward()
    peer.sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.sum(1, keepdim=True))


def test_where():
    condition, x, y = torch.tensor([True, False]), torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])
    assert apply(pointwise.traits("where"), condition, x, y).tolist() == [1.0, 4.0]


@pytest.mark.parametrize("value", [inf, -inf, nan, 0.1, -3, True])
def test_number_text_reads_back(value):
    read = eval(pointwise.text(value))
    assert (read == value and type(read) is type(value)) or (read != read and value != value)


def test_an_unknown_function_is_a_key_error():
    with pytest.raises(KeyError):
        pointwise.traits("frobnicate")
