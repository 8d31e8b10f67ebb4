"""Norms and kept rows of embeddings are planned as one kernel, unless others read the embeddings as well."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusewright import pipeline, tuning

SHAPE = (64, 512)


class Tokens(nn.Module):
    """A function of tokens, of three tables and of what follows these."""

    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(n, 768) for n in (30_000, 512, 2))
        self.norm, self.groups = nn.LayerNorm(768), nn.GroupNorm(8, 768)
        self.function = function

    def forward(self, t: Tensor) -> object:
        return self.function(self, t)


def embedded(m: Tokens, t: Tensor) -> Tensor:
    return m.words(t) + m.places(torch.arange(t.shape[1], device=t.device)) + m.kinds(t * 0)


ONE: dict[str, tuple[Callable[..., object], list[str]]] = {
    "scaled, with positions": (
        lambda m, t: m.norm(m.words(t) * 8 + m.places(torch.arange(512))),
        ["fused_embedding_mul_add_layernorm"],
    ),
    "as in BERT": (lambda m, t: m.norm(embedded(m, t)), ["fused_embedding_add_embedding_add_layernorm"]),
    "as in GPT": (
        lambda m, t: ((x := embedded(m, t)), m.norm(x)),
        ["fused_embedding_add_embedding_add_layernorm"],
    ),
    "rms": (lambda m, t: F.rms_norm(m.words(t), (768,)), ["fused_embedding_rmsnorm"]),
    "of one token": (lambda m, t: m.norm(m.words(t[:, 0])).relu(), ["fused_embedding_layernorm_relu"]),
    "softmax": (lambda m, t: m.words(t).softmax(-1), ["fused_embedding_softmax"]),
    "softmax of tokens": (lambda m, t: m.words(t).softmax(1), ["fused_embedding_softmax"]),
    "unit vectors": (lambda m, t: F.normalize(m.words(t), dim=-1), ["fused_embedding_norm_clamp_min_div"]),
    "means of norms": (lambda m, t: m.norm(m.words(t)).mean(1), ["fused_embedding_layernorm_mean"]),
    # no rows are made of these
    "norms of means": (lambda m, t: m.norm(m.words(t).mean(1)), ["fused_embedding_mean", "fused_layernorm"]),
    "read by others": (lambda m, t: ((x := m.words(t)), m.norm(x)), ["fused_layernorm"]),
    "groups of channels": (lambda m, t: m.groups(m.words(t[:, 0]) * 2), ["fused_embedding_mul", "fused_groupnorm"]),
}


def planned(monkeypatch: pytest.MonkeyPatch, function: Callable[..., object]) -> pipeline.Built:
    """For Hopper, by estimate: nothing runs, and there is no memory."""
    monkeypatch.setattr(pipeline, "kernel_target", lambda device: None)
    monkeypatch.setattr(tuning, "capability_of", lambda device: 90)
    with torch.device("meta"):
        model, tokens = Tokens(function).eval(), torch.empty(SHAPE, dtype=torch.int64)
    return pipeline.build(model, (tokens,), {}, kernels="always", measure=False, target=torch.device("cuda"))


@pytest.mark.parametrize("name", ONE)
def test_kernels(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    function, names = ONE[name]
    built = planned(monkeypatch, function)
    assert sorted(c.name for c in built.choices if c.path == "generated" and c.name != "fused_mul") == sorted(names)


def test_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are read from the table, and results are written: half of what two kernels move."""
    rows = 64 * 512 * 768 * 4
    built = planned(monkeypatch, lambda m, t: m.norm(m.words(t) * 8))
    assert 2 * rows <= built.after.bytes < 2.01 * rows
