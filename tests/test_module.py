"""The drop-in contract, item by item, on models that were rewritten."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import timeit

import pytest
import torch
from torch import nn

import fusewright
from fusewright.dispatch import State
from fusewright.module import state_of
from tests.dropin import DataDependent, Exposed, Final, Gap, Linear, Nested, Normed, fast, images, program_calls, same


@pytest.fixture
def model() -> Gap:
    torch.manual_seed(0)
    return Gap()


class TestShared:
    def test_parameters_are_the_originals(self, model: Gap) -> None:
        f = fast(model)
        assert all(a is b for a, b in zip(f.parameters(), model.parameters(), strict=True))
        assert all(a is b for a, b in zip(f.modules(), model.modules(), strict=True) if a is not f)

    def test_state_dict_keys(self) -> None:
        model = Normed()
        f = fast(model)
        assert list(f.state_dict()) == list(model.state_dict())
        assert [n for n, _ in f.named_parameters()] == [n for n, _ in model.named_parameters()]

    def test_class_signature_and_text(self, model: Gap) -> None:
        f = fast(model)
        assert isinstance(f, Gap) and type(f).__name__ == "Gap"
        assert inspect.signature(f.forward) == inspect.signature(model.forward)
        assert repr(f) == repr(model)

    def test_optimizing_leaves_no_trace(self) -> None:
        model = Normed()
        x = images(requires_grad=True)
        model.conv.weight.grad = torch.ones_like(model.conv.weight)
        grads = {n: p.grad for n, p in model.named_parameters()}
        state = {k: v.clone() for k, v in model.state_dict().items()}
        flags = [m.training for m in model.modules()]
        random = torch.get_rng_state()
        fusewright.optimize(model, (x,), rewrite="always", training=False)
        assert torch.equal(random, torch.get_rng_state())
        assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
        assert all(p.grad is grads[n] for n, p in model.named_parameters()) and x.grad is None
        assert flags == [m.training for m in model.modules()]


class TestWeights:
    @pytest.fixture(params=[True, False], ids=["grad", "no_grad"])
    def pair(self, request: pytest.FixtureRequest, model: Gap):
        f, x = fast(model), images()
        with torch.set_grad_enabled(request.param):
            same(f, model, x, program=True)
            yield f, model, x
            same(f, model, x, program=True)

    def test_edit_in_place(self, pair) -> None:
        with torch.no_grad():
            pair[1].conv.weight.mul_(3.0)

    def test_edit_through_data(self, pair) -> None:
        pair[1].conv.weight.data[0] = 7.0

    def test_load_state_dict(self, pair) -> None:
        pair[0].load_state_dict(Gap().state_dict())

    def test_load_state_dict_assigning(self, pair) -> None:
        pair[0].load_state_dict(Gap().state_dict(), assign=True)

    def test_new_parameter(self, pair) -> None:
        pair[1].conv.weight = nn.Parameter(torch.randn_like(pair[1].conv.weight))

    def test_new_parameter_through_the_result(self, pair) -> None:
        pair[0].bias = nn.Parameter(torch.randn(8))

    def test_new_storage(self, pair) -> None:
        pair[1].conv.weight.data = torch.randn_like(pair[1].conv.weight)

    def test_optimizer_step(self, pair) -> None:
        optimizer = torch.optim.SGD(pair[0].parameters(), lr=0.5)
        with torch.enable_grad():
            pair[0](pair[2]).sum().backward()
        optimizer.step()


def test_trains_like_the_original() -> None:
    torch.manual_seed(0)
    model = Gap()
    twin = copy.deepcopy(model)
    f = fast(model)
    for module in (f, twin):
        torch.manual_seed(1)
        optimizer = torch.optim.Adam(module.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            module(images()).square().mean().backward()
            optimizer.step()
    assert program_calls(f) == 5
    for a, b in zip(f.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


class TestModes:
    def test_train_and_eval_alternate(self) -> None:
        torch.manual_seed(0)
        model, x = Normed(), images()
        f, twin = fast(model, x), copy.deepcopy(model)
        for round_ in range(4):
            for mode in (True, False):
                f.train(mode), twin.train(mode)
                torch.manual_seed(round_)
                found = f(x)
                torch.manual_seed(round_)
                torch.testing.assert_close(found, twin(x), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(f.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-5)
        state = state_of(f)
        assert state is not None and state.replans == 1
        assert program_calls(f) == 4 + 3  # the first evaluation ran the original

    def test_planned_for_training_on_an_eval_model(self) -> None:
        model, x = Normed().eval(), images()
        f = fast(model, x, training=True)
        assert not any(m.training for m in model.modules())
        same(f, model, x, program=False)
        same(f, model, x)
        same(f, model, x)
        assert not fusewright.explain(f).signature.endswith("training mode")

    def test_gradients_of_inputs(self, model: Gap) -> None:
        f = fast(model)
        x = images(requires_grad=True)
        (a,) = torch.autograd.grad(f(x).square().sum(), x)
        (b,) = torch.autograd.grad(model(x).square().sum(), x)
        torch.testing.assert_close(a, b)

    def test_inference_mode_first_then_training(self, model: Gap) -> None:
        f, x = fast(model), images()
        with torch.inference_mode():
            same(f, model, x, program=True)
        with torch.no_grad():
            same(f, model, x, program=True)
            with torch.enable_grad():
                f(x).sum().backward()
        assert model.conv.weight.grad is not None
        with torch.inference_mode():
            same(f, model, images().clone(), program=True)

    def test_frozen_parameters(self, model: Gap) -> None:
        f, x = fast(model.requires_grad_(False)), images()
        same(f, model, x, program=True)
        assert not f(x).requires_grad
        model.requires_grad_(True)
        assert f(x).requires_grad

    def test_autocast_runs_the_original(self, model: Gap) -> None:
        f = fast(model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            same(f, model, images(), program=False)


class TestConversions:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
    def test_to_dtype(self, model: Gap, dtype: torch.dtype) -> None:
        f = fast(model).to(dtype)
        for _ in range(3):
            same(f, model, images(dtype=dtype))
        assert program_calls(f) > 0

    def test_channels_last(self, model: Gap) -> None:
        f = fast(model)
        same(f, model, images().to(memory_format=torch.channels_last), program=True)
        f.to(memory_format=torch.channels_last)
        same(f, model, images(), program=False)
        same(f, model, images(), program=True)

    def test_not_contiguous(self, model: Gap) -> None:
        x = torch.randn(10, 4, 20, 3).permute(1, 3, 0, 2)[..., ::2]
        same(fast(model), model, x, program=True)


@pytest.mark.parametrize(
    "mode",
    [lambda: torch.autocast("cpu"), torch.inference_mode, torch.no_grad],
    ids=["autocast", "inference", "no_grad"],
)
def test_optimized_within_a_mode(model: Gap, mode) -> None:
    with mode():
        f = fast(model, images(), verify=True)
        for _ in range(2):
            f(images(side=9))
    for side in (10, 9):
        x = images(side=side)
        same(f, model, x)
        f(x).sum().backward()


def test_replanning_draws_nothing() -> None:
    model = nn.Sequential(Gap(), nn.Dropout(0.5))
    f, twin = fast(model, images(), verify=True), copy.deepcopy(model)
    inputs = [images(side=side) for side in (10, 9, 9, 9, 10)]
    results = []
    for module in (f, twin):
        torch.manual_seed(3)
        results.append([module(x) for x in inputs])
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert state_of(f).replans == 1


class TestCopies:
    @pytest.mark.parametrize("copier", [copy.deepcopy, lambda f: pickle.loads(pickle.dumps(f))], ids=["copy", "pickle"])
    def test_is_independent(self, model: Gap, copier) -> None:
        f, x = fast(model), images()
        with torch.no_grad():
            expected = f(x)
            other = copier(f)
            same(other, model, x, program=True)
            other.conv.weight.fill_(1.0)
            other.bias.zero_()
            torch.testing.assert_close(f(x), expected)
            torch.testing.assert_close(other(x), Gap.forward(other, x))
            model.conv.weight.mul_(2.0)
            torch.testing.assert_close(other(x), Gap.forward(other, x))
        assert program_calls(other) == 3

    def test_pickle_keeps_the_plan(self, model: Gap) -> None:
        f = fast(model)
        other = pickle.loads(pickle.dumps(f))
        assert fusewright.explain(other).to_json() == fusewright.explain(f).to_json()

    def test_saved_and_loaded_whole(self, model: Gap) -> None:
        file = io.BytesIO()
        torch.save(fast(model), file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
        same(other, model, images(), program=True)
        other.load_state_dict(Gap().state_dict())
        same(copy.deepcopy(other), other, images(), program=True)

    def test_shallow_copy_has_attributes_of_its_own(self, model: Gap) -> None:
        f = fast(model)
        other = copy.copy(f)
        other.divisor = 5.0
        assert model.divisor == 2.0 and other.conv is model.conv
        x = images()
        torch.testing.assert_close(other(x), Gap.forward(other, x))
        same(f, model, x, program=True)

    def test_replica_runs_the_original(self, model: Gap) -> None:
        replica = fast(model)._replicate_for_data_parallel()
        assert state_of(replica) is None
        replica._parameters, replica._modules = dict(model._parameters), dict(model._modules)
        torch.testing.assert_close(replica(x := images()), model(x))


class TestCalls:
    def test_other_batches(self, model: Gap) -> None:
        f = fast(model)
        for batch in (2, 7, 64):
            same(f, model, images(batch), program=True)
        for batch in (1, 0):
            for _ in range(3):
                same(f, model, images(batch))
        assert f(images(0)).shape == (0, 8)

    def test_other_sides(self, model: Gap) -> None:
        f = fast(model)
        same(f, model, images(side=12), program=False)
        same(f, model, images(side=12))
        same(f, model, images(side=12), program=True)
        same(f, model, images(), program=True)

    def test_by_name_by_position_and_by_default(self, model: Gap) -> None:
        f, x = fast(model), images()
        for _ in range(3):
            same(f, model, x)
            same(f, model, x=x)
            same(f, model, x, 3.0)
            same(f, model, x, scale=3.0)
            same(f, model, scale=3.0, x=x)
            same(f, model, x, scale=4.0)
            same(f, model, x, scale=True)
        state = state_of(f)
        assert state is not None and state.replans == 6

    def test_exceptions_are_the_originals(self, model: Gap) -> None:
        f = fast(model)
        for bad in (torch.randn(4, 2, 10, 10), images(side=2), images(dtype=torch.float64), "text"):
            for _ in range(3):
                with pytest.raises(Exception) as expected:
                    model(bad)
                with pytest.raises(type(expected.value)) as found:
                    f(bad)
                assert str(found.value) == str(expected.value)

    def test_nested_and_missing_inputs(self) -> None:
        model, x = Nested(), images()
        f = fast(model, {"image": x, "more": [x, None]}, None)
        for _ in range(3):
            for arguments in (({"image": x, "more": [x, None]}, None), ({"image": x, "more": [x, x]}, 2)):
                found, expected = f(*arguments), model(*arguments)
                assert list(found) == list(expected) and isinstance(found["both"], tuple)
                torch.testing.assert_close(found, expected)
        assert program_calls(f) > 3

    def test_outputs_are_nobody_elses(self) -> None:
        model, x = Exposed(), images()
        f = fast(model, x)
        with torch.no_grad():
            for _ in range(3):
                found, expected = f(x), model(x)
                torch.testing.assert_close(found, expected)
                for value in found[:-1]:
                    value.add_(100.0) if value._base is None else value.copy_(torch.ones_like(value))
                assert found[-1] is model.bias
        assert program_calls(f) == 3

    def test_outputs_keep_their_values(self, model: Gap) -> None:
        f = fast(model)
        first = f(x := images())
        kept = first.clone()
        f(x + 1)
        assert torch.equal(first, kept)


class TestRefusals:
    def test_nothing_to_gain(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        assert fusewright.optimize(model, (torch.randn(2, 4),)) is model
        assert fusewright.explain(model).status == "unchanged"

    def test_uncapturable(self) -> None:
        model = DataDependent()
        result = fusewright.optimize(model, (x := images(),))
        plan = fusewright.explain(model)
        assert result is model and plan.status == "untouched" and "depends on values" in plan.reason
        assert "depends on values" in fusewright.explain(model, (x,)).reason

    def test_optimised_again(self, model: Gap) -> None:
        f = fast(model)
        again = fast(f)
        assert again is not f and type(again) is type(f)
        same(again, model, images(), program=True)

    def test_inner_hooks(self, model: Gap) -> None:
        model.conv.register_forward_hook(lambda *_: None)
        assert fusewright.optimize(model, (images(),), rewrite="always") is model
        assert "hooks" in fusewright.explain(model).reason

    def test_class_that_cannot_be_derived_from(self) -> None:
        model = Final()
        with pytest.warns(RuntimeWarning, match="no subclass"):
            assert fusewright.optimize(model, (images(),), rewrite="always", measure=False) is model
        assert "no subclass" in fusewright.explain(model).reason


def test_smallest_overhead() -> None:
    """A model of five modules pays less than 60 us a call."""
    model = nn.Sequential(Linear(), *(nn.Identity() for _ in range(3)))
    state = State(model, state_of(fast(Linear(), torch.randn(4, 16))).options)  # type: ignore[union-attr]
    x = torch.randn(4, 16)
    state.runner((x,), {})
    seconds = min(timeit.repeat(lambda: state.watch.unchanged(), number=1000, repeat=5)) / 1000
    print(f"watching {len(list(model.modules()))} modules: {seconds * 1e6:.1f} us")
    f = fast(Linear(), x)
    with torch.no_grad():
        ours = min(timeit.repeat(lambda: state_of(f).runner((x,), {}), number=1000, repeat=5)) / 1000  # type: ignore[union-attr]
    print(f"choosing a program: {ours * 1e6:.1f} us")
    assert seconds + ours < 60e-6
