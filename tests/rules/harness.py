"""What every rule is tested with: a `RuleSpec` per rule, and the comparisons the generic tests make.

A spec module (``spec_*.py`` beside this file) exports `SPECS`.  Expressions are built over `inp(...)`; weights are
inputs, too.  A leading dimension `B` is symbolic and evaluated at several sizes.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import sympy
import torch
from hypothesis.strategies import SearchStrategy

from fusewright.codegen.aten import lower
from fusewright.ir import ops, spec
from fusewright.ir.node import Graph, Node, Symbol, make, topological
from fusewright.plan import Work
from fusewright.rules.engine import Rewritten, refusal, rewrite
from fusewright.rules.rule import Match, Rule

B = sympy.Symbol("B", integer=True, positive=True)
BATCHES = (2, 3)

_names = count()


@dataclass(frozen=True)
class RuleSpec:
    """A rule with what its tests need.

    example        the root expression of a case where the rule fires
    cases          hypothesis strategy of such root expressions
    refusals       phrase the engine's reason starts with -> expression where the rule may not fire.  What follows "# "
                   tells several with one phrase apart; the phrase is empty where the pattern must not match
    exact_example  a case whose arithmetic is exact on small integers; `None` when `example` is one
    signed_zeros   whether an ``exact`` rule keeps the sign of a zero (a max over zeros of both signs promises none)
    """

    rule: Rule
    example: Callable[[], Node]
    cases: SearchStrategy[Node]
    refusals: Mapping[str, Callable[[], Node]]
    exact_example: Callable[[], Node] | None = None
    signed_zeros: bool = True


def specs() -> list[RuleSpec]:
    """The specs of all ``spec_*.py`` modules."""
    modules = sorted(p.stem for p in Path(__file__).parent.glob("spec_*.py"))
    return [s for name in modules for s in importlib.import_module(name).SPECS]


def inp(*shape: Any, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Node:
    """A fresh input of this shape; lengths may be `B`."""
    return make(ops.Input(tuple(map(ops.size, shape)), dtype, torch.device(device), f"x{next(_names)}", 0))


def param(*shape: int, dtype: torch.dtype = torch.float64) -> Node:
    """A fresh parameter of this shape."""
    return make(ops.Param(shape, dtype, torch.device("cpu"), f"p{next(_names)}"))


def graph_of(root: Node, *extra: Node, dtype: torch.dtype = torch.float64) -> Graph:
    """The graph that returns `root` (and `extra`), inputs numbered in order, float64 turned to `dtype`."""
    mapping: dict[Node, Node] = {}
    inputs: list[Node] = []
    for node in topological((root, *extra)):
        op = node.op
        if (
            hasattr(op, "dtype")
            and op.dtype == torch.float64
            and isinstance(op, ops.Source | ops.Full | ops.Vector | ops.RangeSum)
        ):
            op = replace(op, dtype=dtype)  # type: ignore[type-var]
        if isinstance(op, ops.Input):
            op = replace(op, name=f"x{len(inputs)}", index=len(inputs))
        mapping[node] = make(op, *(None if a is None else mapping[a] for a in node.args))
        if isinstance(op, ops.Input):
            inputs.append(mapping[node])
    symbols = [
        (i, dim) for i, x in enumerate(inputs) for dim, length in enumerate(x.shape) if isinstance(length, sympy.Symbol)
    ]
    where = {B: Symbol(*symbols[0], 1, None)} if symbols else {}
    return spec.check(Graph(tuple(inputs), (mapping[root], *(mapping[e] for e in extra)), symbols=where))


def cost(node: Node) -> Work:
    """Every operation costs the same."""
    return Work(1.0, 1.0, 1.0, 1.0 if node.inputs else 0.0)


def apply(rule: Rule, graph: Graph, *, finite: bool = True) -> Rewritten:
    """`rule` alone, wherever it is valid; the result is a valid graph."""
    result = rewrite(graph, (rule,), cost, mode="always", finite=finite)
    spec.check(result.graph)
    return result


def fired(rule: Rule, graph: Graph) -> Rewritten:
    """Like `apply`, and the rule must have fired."""
    result = apply(rule, graph)
    assert result.fired, f"{rule.name} did not fire: {[d.reason for d in result.declined]}"
    return result


# Values


def tensors(
    graph: Graph, draw: Callable[[tuple[int, ...], torch.dtype], torch.Tensor], batch: int
) -> list[torch.Tensor]:
    """A value for every input and parameter of the graph, inputs first."""
    return [draw(concrete(n.shape, batch), n.dtype) for n in sources(graph)]


def sources(graph: Graph) -> list[Node]:
    """The inputs, then the parameters and buffers."""
    stored = [n for n in graph.nodes() if isinstance(n.op, ops.Param | ops.Buffer)]
    return [*graph.inputs, *stored]


def concrete(shape: tuple[ops.Size, ...], batch: int) -> tuple[int, ...]:
    """`shape` with `B` replaced."""
    return tuple(int(sympy.sympify(d).subs(B, batch)) for d in shape)


def batches(graph: Graph) -> tuple[int, ...]:
    """The batch sizes to evaluate a graph at."""
    return BATCHES if graph.symbols else (1,)


def normal(generator: torch.Generator) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """Standard normal values; small integers for integer dtypes, coin flips for bool."""

    def draw(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        if dtype.is_floating_point:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        return torch.randint(-4, 5, shape, generator=generator).to(dtype)

    return draw


def integers(generator: torch.Generator) -> Callable[[tuple[int, ...], torch.dtype], torch.Tensor]:
    """Small integers, whatever the dtype."""
    return lambda shape, dtype: torch.randint(-4, 5, shape, generator=generator).to(dtype)


def plant(values: list[torch.Tensor], special: tuple[float, ...], generator: torch.Generator) -> None:
    """Put special values at a few places of one of the floating tensors."""
    targets = [v for v in values if v.dtype.is_floating_point and v.numel()]
    if not targets:
        return
    target = targets[int(torch.randint(len(targets), (), generator=generator))].view(-1)
    for _ in range(max(1, min(4, target.numel() // 8))):
        place = torch.randint(target.numel(), (), generator=generator)
        target[place] = special[int(torch.randint(len(special), (), generator=generator))]


# Running


def run(graph: Graph, values: list[torch.Tensor], like: Graph | None = None) -> tuple[torch.Tensor, ...]:
    """The graph's outputs; `values` belong to the sources of `like` (default: the graph's own)."""
    stored = sources(like or graph)[len(graph.inputs) :]
    owner = SimpleNamespace(**{n.op.path: v for n, v in zip(stored, values[len(graph.inputs) :], strict=True)})  # type: ignore[attr-defined]
    derive, forward = lower(graph).functions()
    return forward(owner, *values[: len(graph.inputs)], *derive(owner))


def gradients(graph: Graph, values: list[torch.Tensor], like: Graph) -> list[torch.Tensor] | None:
    """Gradients of a fixed contraction of the outputs by all floating values; `None` when there is none to take."""
    leaves = [v.clone().requires_grad_(v.dtype.is_floating_point) for v in values]
    outputs = [o for o in run(graph, leaves, like) if o.requires_grad]
    if not outputs:
        return None
    generator = torch.Generator().manual_seed(7)
    seeds = [torch.randn(o.shape, generator=generator, dtype=o.dtype) for o in outputs]
    wanted = [v for v in leaves if v.requires_grad]
    return list(torch.autograd.grad(outputs, wanted, seeds, allow_unused=True, materialize_grads=True))


def assert_near(new: torch.Tensor, old: torch.Tensor, what: str) -> None:
    """Equal but for rounding, relative to the tensor's scale."""
    if not old.dtype.is_floating_point:
        assert torch.equal(new, old), what
        return
    finite = old[torch.isfinite(old)]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    eps = torch.finfo(old.dtype).eps
    message: Any = lambda text: f"{what}: {text}"  # noqa: E731
    torch.testing.assert_close(new, old, rtol=1e4 * eps, atol=1e4 * eps * scale, equal_nan=True, msg=message)


def same_values(new: torch.Tensor, old: torch.Tensor) -> bool:
    """The same values: the same bits but for NaN's and the sign of a zero."""
    equal = new == old
    return bool((equal | ((new != new) & (old != old))).all())


def same_bits(new: torch.Tensor, old: torch.Tensor) -> bool:
    """The same bits, any NaN standing for any other."""
    if not old.dtype.is_floating_point:
        return torch.equal(new, old)
    nan = torch.isnan(old)
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[old.element_size()]
    bits = new.contiguous().view(whole) == old.contiguous().view(whole)
    return torch.equal(torch.isnan(new), nan) and bool((bits | nan).all())


def keeps_nans(new: torch.Tensor, old: torch.Tensor) -> bool:
    """NaN wherever there was one, perhaps in more: a tap that no position reached, times an empty sum, is one."""
    return bool((torch.isnan(new) | ~torch.isnan(old)).all())


def classes(result: Rewritten) -> set[str]:
    """The classes of the applications."""
    return {f.exactness for f in result.fired}


def exactly(spec: RuleSpec) -> Callable[[torch.Tensor, torch.Tensor], bool]:
    """What ``exact`` means for a rule."""
    return same_bits if spec.signed_zeros else same_values


def check_near(rule: Rule, root: Node, seed: int = 0) -> None:
    """The rule fires, and the outputs are near on normal values, at every batch size."""
    graph = graph_of(root)
    new = fired(rule, graph).graph
    for batch in batches(graph):
        values = tensors(graph, normal(torch.Generator().manual_seed(seed)), batch)
        actual, expected = run(new, values, graph)[0], run(graph, values)[0]
        assert_near(actual, expected, f"{rule.name} at batch {batch}")
        # dropout draws in the order of memory, and callers may view what they get
        assert actual.is_contiguous() or not expected.is_contiguous(), f"{rule.name} leaves {actual.stride()}"


def check_gradients(rule: Rule, root: Node, seed: int = 1) -> None:
    """The gradients by every floating value are near on normal values."""
    graph = graph_of(root)
    new = fired(rule, graph).graph
    values = tensors(graph, normal(torch.Generator().manual_seed(seed)), BATCHES[0])
    expected = gradients(graph, values, graph)
    if expected is None:
        return
    actual = gradients(new, values, graph)
    for i, old in enumerate(expected):
        given = torch.zeros_like(old) if actual is None else actual[i]
        assert_near(given, old, f"{rule.name}, gradient {i}")


def check_exact(spec: RuleSpec, root: Node) -> None:
    """On small integers in float64 the values are the same; the bits too where the class is ``exact``."""
    graph, rule = graph_of(root), spec.rule
    result = fired(rule, graph)
    for seed in range(4):
        values = tensors(graph, integers(torch.Generator().manual_seed(seed)), BATCHES[0])
        new, old = run(result.graph, values, graph)[0], run(graph, values)[0]
        assert torch.equal(new, old), f"{rule.name}: {new} instead of {old}"
        assert classes(result) != {"exact"} or exactly(spec)(new, old), f"{rule.name}: the sign of a zero differs"


def check_nonfinite(spec: RuleSpec, root: Node, dtype: torch.dtype, seeds: int) -> None:
    """``exact``: the same bits with NaN, Inf and zeros planted; ``reassociates``: no NaN vanishes, without Inf."""
    graph, rule = graph_of(root, dtype=dtype), spec.rule
    result = fired(rule, graph)
    kinds = classes(result)
    if "finite" in kinds:
        return
    nan, inf = float("nan"), float("inf")
    special = (nan, inf, -inf, 0.0, -0.0) if kinds == {"exact"} else (nan,)
    agree = exactly(spec) if kinds == {"exact"} else keeps_nans
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        values = tensors(graph, normal(generator), BATCHES[0])
        plant(values, special if seed % 2 else special[: seed // 2 % len(special) + 1], generator)
        new, old = run(result.graph, values, graph)[0], run(graph, values)[0]
        assert agree(new, old), f"{rule.name} in {dtype}, seed {seed}: {new} instead of {old} for {values}"


def reason(rule: Rule, key: str, root: Node) -> str:
    """The engine's reason for refusing `root`; ``""`` where the pattern does not match.  The rule must not fire."""
    graph = graph_of(root)
    result = apply(rule, graph)
    assert not result.fired, f"{rule.name} fired in spite of: {key}"
    if result.declined:
        return result.declined[-1].reason
    output = graph.outputs[0]  # the engine does not report refusals of rules about one operation alone
    match = rule.pattern.match(output) if isinstance(output, Node) else None
    return "" if match is None else refusal(rule, match, graph.users(), finite=True) or ""


def phrase(key: str) -> str:
    """The phrase of a refusal's key."""
    return key.partition("# ")[0].rstrip()


def inner_nodes(rule: Rule, graph: Graph) -> Iterator[Node]:
    """The nodes that may have no other user, where the rule matches."""
    root = graph.outputs[0]
    assert isinstance(root, Node)
    match = rule.pattern.match(root)
    if match is None and rule.repeats:  # such a rule is not applied to what is returned
        match = rule.pattern.match(root.arg(0))
    assert match is not None, f"{rule.name} does not match the root of its example"
    yield from (match[name] for name in rule.pattern.inner())


# Phrases of conditions


def phrases(condition: Callable[[Match], str | None]) -> set[str]:
    """Regular expressions of all phrases that a condition and the helpers it calls can return."""
    found: set[str] = set()
    pending: list[Any] = [condition]
    seen: set[Any] = set()
    while pending:
        function = pending.pop()
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        if function.__module__.startswith("fusewright.rules."):
            found |= _returned(function)
            pending += _called(function)
    return found


def _called(function: FunctionType) -> list[Any]:
    """The functions a function names, those in tuples it closes over included."""
    bound = inspect.getclosurevars(function)
    values = [*bound.nonlocals.values(), *bound.globals.values()]
    flat = [v for value in values for v in (value if isinstance(value, tuple | list) else (value,))]
    return [v for v in flat if isinstance(v, FunctionType) and "str" in str(v.__annotations__.get("return", ""))]


def _returned(function: FunctionType) -> set[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    values = [n.value for n in ast.walk(tree) if isinstance(n, ast.Return) and n.value is not None]
    named = {n: v for n, v in function.__globals__.items() if isinstance(v, str)}
    return {_regex(text, named) for value in values for text in _texts(value, named)}


def _texts(value: ast.expr, named: Mapping[str, str]) -> Iterator[ast.expr]:
    """The string expressions an expression may evaluate to."""
    if isinstance(value, ast.IfExp):
        yield from [*_texts(value.body, named), *_texts(value.orelse, named)]
    elif isinstance(value, ast.BoolOp):
        yield from (t for v in value.values for t in _texts(v, named))
    else:
        literal = isinstance(value, ast.Constant) and isinstance(value.value, str)
        if literal or isinstance(value, ast.JoinedStr) or (isinstance(value, ast.Name) and value.id in named):
            yield value


def _regex(text: ast.expr, named: Mapping[str, str]) -> str:
    if isinstance(text, ast.Name):
        return re.escape(named[text.id])
    if isinstance(text, ast.Constant):
        return re.escape(str(text.value))
    assert isinstance(text, ast.JoinedStr)
    return "".join(re.escape(str(v.value)) if isinstance(v, ast.Constant) else ".*" for v in text.values)
