"""Timings that mean something, closures that leave no trace, results that are whole."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch import Tensor, nn

from fusewright.measure import Sample, compare, environment, forward_call, save_results, training_call


def test_candidates_are_told_apart_and_interleaved() -> None:
    order: list[str] = []

    def waits(name: str, seconds: float):
        def run() -> None:
            order.append(name)
            time.sleep(seconds)

        return run

    samples = compare({"short": waits("short", 0.011), "long": waits("long", 0.033)}, min_time=0.0, rounds=4)
    assert samples["long"].median > 2 * samples["short"].median >= 0.022
    assert samples["short"].n == samples["long"].n == 4
    turns = order[4:]  # each an untimed and a timed call
    assert turns[::2] == turns[1::2] == ["short", "long", "long", "short"] * 2


def test_a_long_call_is_called_once_a_round_and_its_second_warm_up_counts() -> None:
    calls: list[float] = []

    def slow() -> None:
        calls.append(0.0)
        time.sleep(0.11)

    samples = compare({"slow": slow}, min_time=0.0, rounds=3)
    assert len(calls) == 1 + 3 and samples["slow"].n == 3


def test_total_time_is_bounded() -> None:
    start = time.perf_counter()
    samples = compare({"slow": lambda: time.sleep(0.05)}, min_time=60.0, rounds=1000, max_time=0.3)
    assert time.perf_counter() - start < 2
    assert 1 <= samples["slow"].n < 20


def test_short_calls_are_timed_in_blocks() -> None:
    calls = [0]

    def count() -> None:
        calls[0] += 1

    samples = compare({"tiny": count}, min_time=0.0, rounds=3)
    assert calls[0] > 100
    assert 0 < samples["tiny"].low <= samples["tiny"].median <= samples["tiny"].high < 1e-3


def test_nothing_to_compare() -> None:
    assert compare({}, rounds=1, min_time=0.0) == {}


def test_single_time_is_its_own_quartiles() -> None:
    assert Sample.of([2.0]) == Sample(2.0, 2.0, 2.0, 1)
    assert Sample.of([1.0, 2.0, 3.0]) == Sample(2.0, 1.5, 2.5, 3)


class Doubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor, factor: float = 2.0) -> dict[str, Tensor]:
        return {"y": x * self.weight * factor, "index": x.argmax(-1)}


@pytest.mark.parametrize("inputs", [(torch.ones(2, 3), 3.0), {"x": torch.ones(2, 3), "factor": 3.0}])
def test_forward_call_has_no_graph(inputs: object) -> None:
    output = forward_call(Doubles(), inputs)()
    assert torch.equal(output["y"], torch.full((2, 3), 3.0))
    assert not output["y"].requires_grad
    assert forward_call(nn.ReLU(), torch.ones(2))().shape == (2,)


def test_training_call_gives_gradients_and_leaves_none() -> None:
    model, x = Doubles(), torch.ones(2, 3)
    run = training_call(model, (x,))
    first, second = run(), run()
    assert [g.shape for g in first] == [(2, 3), (3,)]
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert model.weight.grad is None and x.grad is None and not x.requires_grad
    assert len(training_call(model, (x,), input_gradients=False)()) == 1


def test_training_call_works_under_no_grad_and_refuses_a_model_without_gradients() -> None:
    with torch.no_grad():
        assert len(training_call(Doubles(), (torch.ones(2, 3),))()) == 2
    with pytest.raises(ValueError, match="no gradient"):
        training_call(nn.Embedding(3, 2).requires_grad_(False), (torch.tensor([1]),))()


def test_environment_is_json_and_names_what_matters() -> None:
    facts = json.loads(json.dumps(environment()))
    assert facts["torch"] == torch.__version__ and facts["threads"] == torch.get_num_threads()
    assert facts["device"] and facts["date"].startswith("20")


def test_results_are_written_whole_or_not_at_all(tmp_path) -> None:
    path = tmp_path / "new" / "results.json"
    save_results(path, {"rows": [1]})
    with pytest.raises(TypeError):
        save_results(path, {"rows": object()})
    assert json.loads(path.read_text()) == {"rows": [1]}
    assert [entry.name for entry in path.parent.iterdir()] == ["results.json"]


@pytest.mark.gpu
def test_cuda_times_are_the_device_s_own() -> None:
    x = torch.randn(4096, 4096, device="cuda")
    samples = compare({"one": lambda: x @ x, "three": lambda: x @ x @ x @ x}, device="cuda", rounds=5, min_time=0.0)
    assert 2 < samples["three"].median / samples["one"].median < 4
