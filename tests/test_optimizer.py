"""`optimize` and `explain`: arguments, decisions, and what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusewright
from fusewright import FusewrightError, UnsupportedError
from fusewright.measure import Sample
from fusewright.module import state_of
from fusewright.runtime.device import DeviceFacts
from fusewright.verification import Check, Verdict
from tests.dropin import Gap, fast, images, program_calls, same


@pytest.fixture
def model() -> Gap:
    torch.manual_seed(0)
    return Gap()


class TestArguments:
    @pytest.mark.parametrize(
        "options, message",
        [
            ({"precision": "half"}, "precision is 'half'; choose one of eager, fp32, tf32"),
            ({"rewrite": True}, "rewrite is True; choose one of cost, always, never"),
            ({"kernels": "some"}, "kernels is 'some'; choose one of auto, always, never"),
        ],
    )
    def test_choices(self, model: Gap, options: dict[str, Any], message: str) -> None:
        with pytest.raises(FusewrightError, match=message):
            fusewright.optimize(model, (images(),), **options)

    def test_kernels_need_a_compiler(self, model: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CXX", "no-such-compiler")
        with pytest.raises(UnsupportedError, match=r"kernels='always' needs .* no-such-compiler does not work"):
            fusewright.optimize(model, (images(),), kernels="always")

    def test_no_module(self) -> None:
        with pytest.raises(FusewrightError, match=r"model is a function, not an nn\.Module"):
            fusewright.optimize(lambda x: x, (images(),))  # type: ignore[arg-type]

    def test_no_inputs(self, model: Gap) -> None:
        with pytest.raises(FusewrightError, match="example_inputs is a NoneType; pass a tuple"):
            fusewright.optimize(model, None)

    @pytest.mark.parametrize(
        "inputs", [(x := images(), 2.0), [x], x, {"x": x, "scale": 2.0}], ids=("tuple", "list", "tensor", "dict")
    )
    def test_forms_of_inputs(self, model: Gap, inputs: Any) -> None:
        f = fusewright.optimize(model, inputs, rewrite="always", verify=False, measure=False)
        args, kwargs = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        same(f, model, *((args,) if isinstance(args, torch.Tensor) else args), program=True, **kwargs)


class TestDecisions:
    def test_a_wrong_program_is_not_kept(self, model: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
        bad = Verdict((Check("example", False, "planted"),), "nothing", 0.0)

        def verify(*_: object, **__: object) -> Verdict:
            return bad

        monkeypatch.setattr("fusewright.trial._verify", verify)
        assert fusewright.optimize(model, (images(),), rewrite="always", measure=False) is model
        plan = fusewright.explain(model)
        assert plan.status == "unchanged" and plan.verdict is bad
        assert plan.reason == "verification failed (example: planted); the original is kept"

    def test_wrong_gradients_leave_calls_without_them(self, model: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those that have any are the original's, and told why."""
        real = fusewright.trial._verify

        def verify(trial: Any, built: Any, **how: Any) -> Verdict:
            wrong = Check("gradients", False, "planted")
            return (
                Verdict((Check("example", True, ""), wrong), "all", 0.0)
                if trial.gradients
                else real(trial, built, **how)
            )

        monkeypatch.setattr("fusewright.trial._verify", verify)
        f = fusewright.optimize(model, (images(),), rewrite="always", measure=False)
        plan = fusewright.explain(f)
        assert plan.status == "rewritten" and plan.verdict is not None and plan.verdict.ok
        said = "verification failed (gradients: planted)"
        assert [(k.path, k.reason == said) for k in plan.kept] == [("rewritten", False), *[("original", True)] * 2]
        with torch.no_grad():
            same(f, model, images(), program=True)
        same(f, model, images(), program=False)

    @pytest.mark.parametrize(
        "forward, training, program",
        [(0.5, 0.5, (True, True)), (0.5, 2.0, (True, False)), (2.0, 0.5, (False, True)), (0.99, 0.99, None)],
    )
    @pytest.mark.sampled
    def test_each_mode_takes_the_faster_path(
        self, model: Gap, monkeypatch: pytest.MonkeyPatch, forward: float, training: float, program: Any
    ) -> None:
        def timed(calls: Any, **_: object) -> dict[Any, Sample]:
            for call in calls.values():
                call()
            ratio = forward if len(seen) == 0 else training
            seen.append(1)
            return {"original": Sample.of([1.0]), "rewritten": Sample.of([ratio])}

        seen: list[int] = []
        monkeypatch.setattr("fusewright.trial.compare", timed)
        monkeypatch.setattr("fusewright.trial._variants", lambda trial, built, most: [built])
        monkeypatch.setattr("fusewright.pipeline.device_facts", _generous)
        f = fusewright.optimize(model, (images(),), verify=False)
        if program is None:
            assert f is model and "not faster" in fusewright.explain(model).reason
            return
        with torch.no_grad():
            same(f, model, images(), program=program[0])
        same(f, model, images(), program=program[1])

    def test_frozen_models_gain_with_gradients_on(self, model: Gap, monkeypatch: pytest.MonkeyPatch) -> None:
        times = {"original": Sample.of([2.0]), "rewritten": Sample.of([1.0])}
        monkeypatch.setattr("fusewright.trial.compare", lambda *_, **__: times)
        monkeypatch.setattr("fusewright.trial._variants", lambda trial, built, most: [built])
        f = fast(model.requires_grad_(False), images(), measure=True)
        same(f, model, images(), program=True)
        assert [kept.mode for kept in fusewright.explain(f).kept] == ["forward", "with input gradients"]


def _generous(_: object) -> Any:
    from fusewright.runtime.device import DeviceFacts

    return DeviceFacts("none", 1e6, 1e9, 1e9, 1e9, 1e9, 1e9, 1e-9)


class TestExplaining:
    def test_a_result(self, model: Gap) -> None:
        plan = fusewright.explain(fast(model, images(), verify=True))
        assert plan.status == "rewritten" and plan.rules and plan.verdict is not None and plan.verdict.ok
        assert plan.before is not None and plan.after is not None and plan.after.flops < plan.before.flops
        record = json.loads(plan.to_json())
        assert record["status"] == "rewritten" and record["verdict"]["ok"] and "Gap" in str(plan)
        assert "reassociates" in " ".join(plan.precision)

    def test_a_model_before_optimizing(self, model: Gap) -> None:
        plan = fusewright.explain(model, (images(),))
        assert plan.model == "Gap" and plan.verdict is None
        assert state_of(model) is None

    def test_a_model_without_a_plan(self, model: Gap) -> None:
        with pytest.raises(FusewrightError, match="Gap has no plan yet: pass example_inputs"):
            fusewright.explain(model)

    def test_a_result_on_other_inputs(self, model: Gap) -> None:
        f = fast(model)
        assert "12, 12" in fusewright.explain(f, (images(side=12),)).signature
        assert program_calls(f) == 0

    def test_modes_are_named(self, model: Gap) -> None:
        plan = fusewright.explain(fast(model, images(), training=False))
        assert plan.signature.endswith("evaluation mode") and plan.device == "cpu"


class TestUntouchable:
    @pytest.mark.parametrize(
        "change, reason",
        [
            (lambda m: setattr(m, "forward", lambda x: x), "replaced on the instance"),
            (lambda m: m.conv.register_forward_hook(lambda *_: None), "hooks"),
            (lambda m: setattr(m, "conv", nn.LazyConv2d(8, 3)), "lazy"),
            (lambda m: m.to("meta"), "meta device"),
            (lambda m: m.register_buffer("odd", torch.ones(1).as_subclass(Odd)), "Odd"),
        ],
    )
    def test_reason(self, model: Gap, change: Any, reason: str) -> None:
        change(model)
        assert fusewright.optimize(model, (images(),), rewrite="always") is model
        plan = fusewright.explain(model)
        assert plan.status == "untouched" and reason in plan.reason

    @pytest.mark.parametrize(
        "x, reason", [(images(batch=0), "an input is empty"), (images().to_sparse(), "takes a sparse tensor")]
    )
    def test_inputs(self, model: Gap, x: torch.Tensor, reason: str) -> None:
        assert fusewright.optimize(model, (x,), rewrite="always") is model
        assert reason in fusewright.explain(model).reason

    def test_scripted(self, model: Gap) -> None:
        scripted = torch.jit.script(model)
        assert fusewright.optimize(scripted, (images(),)) is scripted
        assert "TorchScript" in fusewright.explain(scripted).reason


class Odd(torch.Tensor):
    pass


def test_progress_is_told(model: Gap) -> None:
    told: list[str] = []
    fusewright.optimize(model, (images(),), rewrite="always", measure=False, progress=told.append)
    assert told[0] == "capturing and rewriting" and "verifying: gradients" in told


class _Epilogue(nn.Module):
    """A convolution with what a kernel takes in, and nothing that algebra would leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x)).amax((2, 3))


class _Pooled(_Epilogue):
    """The same where most of the convolution need not be computed."""

    def forward(self, x: Tensor) -> Tensor:
        return F.avg_pool2d(self.conv(x), 4).sigmoid().sum((2, 3))


@pytest.mark.parametrize("kind, gradients", [(_Epilogue, "original"), (_Pooled, "rewritten")])
def test_unmeasured_gradients_go_where_less_is_computed(
    kind: type[nn.Module], gradients: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU whose rates are these, whatever this one measured of itself."""
    facts = DeviceFacts("a CPU", conv=5e10, matmul=1e11, wide=5e10, memory=5e10, reduce=7e10, window=1e9, launch=3e-6)
    monkeypatch.setattr("fusewright.pipeline.device_facts", lambda _: facts)
    model, x = kind(), torch.randn(4, 8, 66, 66)
    plan = fusewright.explain(fusewright.optimize(model, (x,), verify=False, measure=False))
    assert [k.path for k in plan.kept] == ["rewritten", gradients, gradients]
    assert [
        k.path
        for k in fusewright.explain(
            fusewright.optimize(model, (x,), verify=False, measure=False, kernels="always")
        ).kept
    ] == ["rewritten"] * 3
