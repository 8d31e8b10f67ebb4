"""The tests every rule must pass, and the test that no rule goes without them."""

from __future__ import annotations

import inspect
import re
from dataclasses import replace

import pytest
import torch
from harness import (
    RuleSpec,
    apply,
    check_exact,
    check_gradients,
    check_near,
    check_nonfinite,
    fired,
    graph_of,
    inner_nodes,
    phrase,
    phrases,
    reason,
    specs,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusewright.rules

SPECS = specs()
every_rule = pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.rule.name)


@every_rule
def test_fires_and_equals_the_original(spec: RuleSpec) -> None:
    check_near(spec.rule, spec.example())


@every_rule
def test_is_exact_on_small_integers(spec: RuleSpec) -> None:
    check_exact(spec, (spec.exact_example or spec.example)())


@every_rule
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_keeps_what_its_class_promises_for_non_finite_values(spec: RuleSpec, dtype: torch.dtype) -> None:
    for example in (spec.example, spec.exact_example):
        if example is not None:
            check_nonfinite(spec, example(), dtype, seeds=16)


@every_rule
def test_gradients(spec: RuleSpec) -> None:
    check_gradients(spec.rule, spec.example())


@every_rule
def test_cases(spec: RuleSpec) -> None:
    @settings(max_examples=40, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(spec.cases, st.integers(0, 1000))
    def check(root, seed):
        check_near(spec.rule, root, seed)
        check_nonfinite(spec, root, torch.float64, seeds=2)
        check_gradients(spec.rule, root, seed)

    check()


@pytest.mark.parametrize(
    ("spec", "key"), [pytest.param(s, key, id=f"{s.rule.name}: {key}") for s in SPECS for key in s.refusals]
)
def test_refuses(spec: RuleSpec, key: str) -> None:
    said = reason(spec.rule, key, spec.refusals[key]())
    assert said.startswith(phrase(key)) and bool(said) == bool(phrase(key)), f"refused because {said!r}"


@every_rule
def test_refuses_when_an_inner_value_has_another_user(spec: RuleSpec) -> None:
    graph = graph_of(spec.example())
    for inner in inner_nodes(spec.rule, graph):
        result = apply(spec.rule, replace(graph, outputs=(*graph.outputs, inner)))
        assert not result.fired
        assert any(d.reason.endswith("has another user") for d in result.declined)


@every_rule
def test_another_user_is_blamed_only_where_nothing_else_refuses(spec: RuleSpec) -> None:
    for key in filter(phrase, spec.refusals):
        graph = graph_of(spec.refusals[key]())
        shared = replace(graph, outputs=(*graph.outputs, *inner_nodes(spec.rule, graph)))
        blamed = [d.reason for d in apply(spec.rule, shared).declined if d.reason.endswith("has another user")]
        assert not blamed, key


@every_rule
def test_drops_a_dependence_only_when_asked(spec: RuleSpec) -> None:
    graph = graph_of(spec.example())
    if any(f.exactness == "finite" for f in fired(spec.rule, graph).fired):
        declined = apply(spec.rule, graph, finite=False)
        assert not declined.fired and "finite" in declined.declined[-1].reason


@every_rule
def test_every_phrase_of_the_condition_has_its_refusal(spec: RuleSpec) -> None:
    said = [reason(spec.rule, key, example()) for key, example in spec.refusals.items()]
    missing = [p for p in phrases(spec.rule.condition) if not any(re.fullmatch(p, s) for s in said)]
    assert not missing, f"no refusal says {missing}"


@every_rule
def test_reads_like_a_rule(spec: RuleSpec) -> None:
    rule = spec.rule
    assert "->" in rule.doc
    assert re.search(r"\b(exact|reassociates|finite)\b", rule.doc), "the docstring does not name the class"
    assert len(inspect.getsource(rule.replacement).splitlines()) <= 25


def test_every_rule_has_its_spec() -> None:
    specified = [s.rule.name for s in SPECS]
    assert sorted(specified) == sorted(set(specified)), "two specs for one rule"
    assert [r.name for r in fusewright.rules.RULES if r.name not in specified] == []
    assert all(s.refusals for s in SPECS), "a rule without refusals"
