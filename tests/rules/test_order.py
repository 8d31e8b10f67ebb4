"""Which roots are offered to the rules first."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fusewright.capture import capture
from fusewright.ir.placement import placed
from fusewright.rules import RULES
from fusewright.rules.engine import rewrite
from fusewright.runtime.device import LARGE_GPU
from fusewright.schedule.cost import CostModel
from fusewright.schedule.kernel_cost import by_kernels

POOLED = "sum_c(avg_pool(x)[c]) = avg_pool(sum_c(x[c]))"
SLID = "avg_pool(conv(x, w)) = conv_strided(box(x), w)"
FOLDED = "avg_pool(conv_transpose_s(x, w)) = interleave(conv_strided(x, box * w))"
THROUGH = "sum_P(avg_pool(conv(x, w))) = conv(rangesum_taps(x), w)"


class Summed(nn.Module):
    """A convolution, an average pooling, and the mean over channels and perhaps more."""

    def __init__(self, conv: nn.Module, pool: nn.Module, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.conv, self.pool, self.dims = conv, pool, dims

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: torch.Tensor = self.pool(self.conv(x)).mean(self.dims)
        return mean


def fired(model: nn.Module, *shape: int) -> list[str]:
    graph = placed(capture(model.eval().requires_grad_(False), (torch.empty(shape),), {}).graph, torch.device("cuda"))
    cost = CostModel(LARGE_GPU, dict.fromkeys(graph.symbols, shape[0]), derived_ahead=True, fusing=True)
    found = rewrite(graph, RULES, cost, fusing=True, whole=by_kernels(cost))
    return [f.rule for f in found.fired]


def test_a_sum_over_features_comes_before_a_pool_that_would_be_in_its_way() -> None:
    """Window sums of 65 channels would be written for a convolution of one feature."""
    model = Summed(nn.ConvTranspose2d(65, 131, (5, 4)), nn.AvgPool2d(8, padding=(4, 0)), (1,))
    found = fired(model, 64, 65, 185, 142)
    assert found[0] == POOLED and SLID not in found


def test_else_rules_go_from_the_inputs_on() -> None:
    """One feature of 810 taps would be estimated to take little less."""
    model = Summed(nn.Conv3d(42, 80, 2, padding=(1, 0, 1), dilation=2), nn.AvgPool3d((7, 7, 8)), (1, 2, 3, 4))
    assert fired(model, 8, 42, 69, 70, 65)[0] == SLID


@pytest.mark.parametrize("dims", [(1,), (1, 2)])
def test_features_are_summed_before_windows_are_folded(dims: tuple[int, ...]) -> None:
    """Into the weight of a transposed convolution with strides, which has one feature then."""
    conv = nn.ConvTranspose3d(30, 82, (6, 1, 7), (1, 2, 3), (2, 0, 1))
    model = Summed(conv, nn.AvgPool3d((2, 8, 8), (1, 4, 4)), dims)
    found = fired(model, 32, 30, 37, 43, 36)
    assert found[0] == POOLED and {"sum_o(conv(x, w)[o]) = conv(x, sum_o(w[o]))", FOLDED} <= {*found}


@pytest.mark.parametrize(("stride", "taken"), [((2, 1, 7), True), ((8, 8, 8), False)])
def test_features_are_summed_before_windows_that_share_some(stride: tuple[int, ...], taken: bool) -> None:
    """Else a convolution and a function of it would reach memory, for each of 116 features to be pooled."""
    conv = nn.Sequential(nn.Conv3d(62, 116, (6, 3, 1), 2, (6, 1, 0), (3, 1, 1)), nn.ReLU6())
    found = fired(Summed(conv, nn.AvgPool3d(8, stride, (2, 3, 1)), (1,)), 16, 62, 44, 50, 60)
    assert found == ([POOLED] if taken else [])


@pytest.mark.parametrize("between", [nn.Identity(), nn.Hardtanh()])
def test_a_mean_of_pooled_positions_is_one_of_what_they_hold(between: nn.Module) -> None:
    """In a kernel of 9 x 19 x 11 taps the pool would leave nine tiles for a whole device, and a mean behind them."""
    conv = nn.Conv3d(39, 51, 7, 3, (6, 2, 2), (3, 1, 3))
    model = Summed(conv, nn.Sequential(between, nn.AvgPool3d((3, 5, 5))), (2, 3, 4))
    found = fired(model, 8, 39, 58, 65, 71)
    assert (THROUGH in found) == isinstance(between, nn.Identity)


def test_a_pool_that_no_sum_moves_through_stays_in_its_kernel() -> None:
    """Of 3 channels range sums would take longer; of the convolution's values they would be a second kernel."""
    model = Summed(nn.Conv3d(3, 5, 7, 3, (6, 2, 2), (3, 1, 3)), nn.AvgPool3d((3, 5, 5)), (2, 3, 4))
    assert fired(model, 2, 3, 58, 65, 71) == ["avg_pool(conv(x, w)) = conv_strided(x, box * w)"]
