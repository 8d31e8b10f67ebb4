"""The bench: every peer is checked before it is timed, and none can bring it down."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from fusewright import peers
from fusewright.errors import UnsupportedError
from fusewright.peers import PEERS, Bench, Peer, bench


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


class Scaled(nn.Module):
    def __init__(self, model: nn.Module, factor: float) -> None:
        super().__init__()
        self.model, self.factor = model, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x) * self.factor


class ForwardOnly(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            raise RuntimeError("no backward here")
        return self.model(x)


def crash(model: nn.Module, inputs: object) -> nn.Module:
    raise RuntimeError("cannot be built\nand more")


def run(**options) -> dict[str, peers.Row]:
    result = bench(Model(), (torch.randn(8, 4),), ("eager",), rounds=2, max_time=1.0, **options)
    return {row.name: row for row in result.rows}


def test_a_peer_that_changes_the_mode_disturbs_no_other() -> None:
    rows = run(include={"exporter": lambda model, _: Scaled(model.eval(), 1.0), "next": lambda model, _: model})
    assert "differs" in rows["exporter"].reason
    assert rows["next"].error == 0.0 and rows["next"].forward is not None


def test_eager_is_always_there_and_is_the_measure_of_the_others() -> None:
    result = bench(Model(), (torch.randn(8, 4),), (), include={"same": lambda m, x: m}, rounds=2, max_time=1.0)
    rows = {row.name: row for row in result.rows}
    assert list(rows) == ["eager", "same"]
    assert rows["eager"].ratio == 1.0 and rows["same"].error == 0.0
    assert rows["same"].ratio == rows["eager"].forward.median / rows["same"].forward.median
    assert rows["eager"].training is None


def test_training_is_timed_where_asked_for() -> None:
    rows = run(training=True)
    assert rows["eager"].training.median > 0 and rows["eager"].training_ratio == 1.0


def test_wrong_answer_is_not_timed() -> None:
    row = run(include={"wrong": lambda m, x: Scaled(m, 1.1)})["wrong"]
    assert row.forward is None and row.error == pytest.approx(0.1, rel=1e-3) and "differs" in row.reason


def test_nan_is_a_wrong_answer() -> None:
    row = run(include={"nan": lambda m, x: Scaled(m, float("nan"))})["nan"]
    assert row.forward is None and "differs" in row.reason


def test_failing_peer_is_a_row_with_one_sentence() -> None:
    rows = run(include={"crash": crash})
    assert rows["crash"].reason == "RuntimeError: cannot be built" and rows["eager"].forward is not None


def test_peer_that_fails_in_training_keeps_its_forward_time() -> None:
    row = run(include={"forward only": lambda m, x: ForwardOnly(m)}, training=True)["forward only"]
    assert row.forward is not None and row.training is None and "no backward here" in row.reason


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Peer("absent", crash, needs=("no_such_package",))
    monkeypatch.setattr(peers, "PEERS", {**PEERS, "absent": absent})
    result = bench(Model(), (torch.randn(8, 4),), ("absent",), rounds=1, max_time=1.0)
    assert result.rows[1].reason == "no_such_package is not installed"


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="no peer is called tvm; choose from eager"):
        bench(Model(), (torch.randn(8, 4),), ("tvm",))


def test_model_is_left_as_found() -> None:
    model = Model()
    state = {key: value.clone() for key, value in model.state_dict().items()}
    torch.manual_seed(1)
    x, stream = torch.randn(8, 4), torch.get_rng_state()
    bench(model, {"x": x}, ("eager",), training=True, rounds=1, max_time=1.0)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), stream) and model.linear.weight.grad is None


def test_record_is_json() -> None:
    result = bench(Model(), (torch.randn(8, 4),), ("eager",), include={"crash": crash}, rounds=1, max_time=1.0)
    assert isinstance(result, Bench)
    record = json.loads(json.dumps(result.record()))
    assert record["model"] == "Model" and [row["name"] for row in record["rows"]] == ["eager", "crash"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["compile", "onnxruntime", "openvino"])
def test_real_peer_gives_the_same_answer(name: str) -> None:
    if any(peers.importlib.util.find_spec(package) is None for package in PEERS[name].needs):
        pytest.skip(f"{name} is not installed")
    row = bench(Model().eval(), (torch.randn(8, 4),), (name,), rounds=2, max_time=5.0).rows[1]
    assert row.reason == "" and row.error < 1e-5 and row.forward is not None
