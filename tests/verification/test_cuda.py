"""What only a GPU shows: tf32, streams, memory that is handed out again."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright.verification import Verdict, verify
from fusewright.verification.numerics import round_to_tf32

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class ConvMean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.max_pool2d(self.conv(x), 2)).mean((2, 3))


class Tf32ConvMean(ConvMean):
    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(round_to_tf32(x), round_to_tf32(self.conv.weight), self.conv.bias)
        return F.relu(F.max_pool2d(y, 2)).mean((2, 3))


class OtherStream(ConvMean):
    """Launches on the default stream, whatever the current one is."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.cuda.stream(torch.cuda.default_stream()):
            return super().forward(x)


class ReadsNewMemory(ConvMean):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y + torch.empty_like(y).mul_(0)


def failed(verdict: Verdict) -> set[str]:
    return {row.name for row in verdict.failed}


def images() -> tuple[Tensor]:
    return (torch.randn(4, 8, 34, 34, device="cuda"),)


def test_honest_candidate_passes() -> None:
    verdict = verify(ConvMean(), ConvMean(), images(), seconds=30)
    assert not failed(verdict), [(row.name, row.detail) for row in verdict.failed]
    assert next(row for row in verdict.rows if row.name == "stream").ok


def test_tf32_is_judged_by_the_precision_asked_for() -> None:
    reference, candidate = ConvMean().requires_grad_(False), Tf32ConvMean().requires_grad_(False)
    options = {"seconds": 0, "gradients": False}
    assert "example" not in failed(verify(reference, candidate, images(), precision="tf32", **options))
    assert "example" in failed(verify(reference, candidate, images(), precision="fp32", **options))


def test_work_on_another_stream_is_caught() -> None:
    assert "stream" in failed(verify(ConvMean(), OtherStream(), images(), gradients=False))


def test_read_of_new_memory_is_caught() -> None:
    assert "poisoned memory" in failed(verify(ConvMean(), ReadsNewMemory(), images(), gradients=False))


def test_gpu_memory_and_generator_are_left_as_found() -> None:
    model, x = ConvMean(), images()
    torch.cuda.manual_seed(7)
    before = torch.cuda.get_rng_state()
    verify(model, model, x, seconds=5)
    assert torch.equal(torch.cuda.get_rng_state(), before)


class WrongWhenLarge(Tf32ConvMean):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1.05 if x.shape[0] == 64 else 1.0)


def test_the_full_size_allows_for_tf32_and_no_more() -> None:
    """Eager has tf32's error there as well, which is far beyond what float32 explains."""
    reference, x = ConvMean().requires_grad_(False), torch.randn(64, 8, 34, 34, device="cuda")
    for candidate, wrong in ((Tf32ConvMean(), set()), (WrongWhenLarge(), {"full size"})):
        verdict = verify(
            reference, candidate.requires_grad_(False), (x,), precision="tf32", max_bytes=25_000_000, gradients=False
        )
        rows = {row.name: row for row in verdict.rows}
        assert "of 64" in rows["example"].detail and rows["full size"].ok is not None
        assert failed(verdict) == wrong
