"""Chains of modules through capture -> rewrite -> lower, against the original in float64 and, loosely, in float32.

    python -m tests.fuzz.chains --seed 0 --count 1000 --json summary.json

prints every failure with the seed that reproduces it (``--seed S --count 1``).
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import traceback
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor, nn

if __package__:
    from tests.fuzz.modules import Drawn, draw
else:
    from modules import Drawn, draw

from fusewright.capture import Captured, capture
from fusewright.codegen.aten import lower
from fusewright.ir import ops, spec
from fusewright.ir.node import Graph, Node, make
from fusewright.plan import Work
from fusewright.rules import RULES
from fusewright.rules.engine import Rewritten, rewrite

EPS32 = torch.finfo(torch.float32).eps


class Wrong(Exception):
    """A chain whose rewritten program does something else than the model."""


@dataclass
class Tally:
    """What came of some chains."""

    chains: int = 0
    redrawn: int = 0
    untouched: int = 0  # no rule fired
    opaque: int = 0  # with an operation that is not understood, so without a float32 run
    fired: Counter[str] = field(default_factory=Counter)  # rule -> chains in which it fired
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        self.chains += other.chains
        self.redrawn += other.redrawn
        self.untouched += other.untouched
        self.opaque += other.opaque
        self.fired += other.fired
        self.failures += other.failures

    def summary(self) -> dict[str, Any]:
        counts = {"chains": self.chains, "redrawn": self.redrawn, "untouched": self.untouched, "opaque": self.opaque}
        return {**counts, "failures": self.failures, "fired": {rule.name: self.fired[rule.name] for rule in RULES}}


def run(seeds: Sequence[int]) -> Tally:
    """All chains of these seeds."""
    tally = Tally()
    for seed in seeds:
        tally.chains += 1
        try:
            drawn = draw(seed)
            tally.redrawn += drawn.redrawn
            names, opaque = check(drawn, seed)
            tally.fired.update(names)
            tally.untouched += not names
            tally.opaque += opaque
        except Exception as error:
            text = "".join(traceback.format_exception(error)[-3:])
            tally.failures.append({"seed": seed, "error": f"{type(error).__name__}: {error}", "trace": text})
    return tally


def check(drawn: Drawn, seed: int) -> tuple[set[str], bool]:
    """Check one chain; returns the names of the rules that fired, and whether the graph has opaque operations."""
    model, x = drawn.model, drawn.x
    captured = capture(copy.deepcopy(model), (x.clone(),), {})
    rewritten = _rewritten(captured.graph, seed)
    program = lower(rewritten.graph, captured.out_spec, captured.constants).functions()
    # the same numbers in another order would make ties of products and sums over the batch
    other = x.flip(0) * 0.9 + 0.1 * torch.linspace(-1, 1, x.numel(), dtype=x.dtype).sin().view_as(x)
    batches = [x, torch.cat([x, other])] if captured.graph.symbols else [x]
    for value in batches:
        _compare(model, program, value, seed)
    opaque = any(isinstance(n.op, ops.Opaque) for n in captured.graph.nodes())
    if not opaque:
        _check_float32(drawn, captured, seed)
    return {f.rule for f in rewritten.fired}, opaque


def _rewritten(graph: Graph, seed: int) -> Rewritten:
    """Every valid rule applied, the choice between several left to chance."""
    random = Random(seed)
    result = rewrite(
        spec.check(graph), RULES, lambda node: Work(1.0, 1.0, 1.0, random.random()), mode="always", finite=seed % 2 == 0
    )
    spec.check(result.graph)
    return result


# Float64: outputs, all gradients, running statistics


def _compare(model: nn.Module, program: tuple[Any, Any], x: Tensor, seed: int) -> None:
    old_model, new_model = copy.deepcopy(model), copy.deepcopy(model)
    old = _evaluate(old_model, old_model, x, seed)
    new = _evaluate(lambda value: _run(program, new_model, value), new_model, x, seed)
    for i, (a, b) in enumerate(zip(new.outputs, old.outputs, strict=True)):
        _require_near(a, b, f"output {i}", 0.0)
        if b.is_contiguous() and not a.is_contiguous():
            raise Wrong(f"output {i} has strides {a.stride()} instead of {b.stride()}")
    for name, buffer in old_model.named_buffers():
        _require_near(new_model.get_buffer(name), buffer, f"buffer {name}", 0.0)
    largest = max((float(g.abs().max()) for g in old.gradients.values() if g.numel()), default=0.0)
    for name, b in old.gradients.items():
        _require_near(new.gradients[name], b, f"gradient of {name}", largest)


@dataclass(frozen=True)
class _Values:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def _run(program: tuple[Any, Any], model: nn.Module, x: Tensor) -> Any:
    derive, forward = program
    return forward(model, x, *derive(model))


def _evaluate(function: Any, model: nn.Module, x: Tensor, seed: int) -> _Values:
    """The outputs, and the gradients of one random combination of them by the input and every parameter."""
    leaf = x.clone().requires_grad_()
    torch.manual_seed(seed)
    outputs = list(function(leaf))
    torch.manual_seed(seed + 1)
    leaves = {"the input": leaf, **dict(model.named_parameters())}
    score = sum((o * torch.randn(o.shape, dtype=o.dtype)).sum() for o in outputs)
    if not isinstance(score, Tensor) or not score.requires_grad:
        return _Values(outputs, {name: torch.zeros_like(v) for name, v in leaves.items()})
    found = torch.autograd.grad(score, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return _Values([o.detach() for o in outputs], dict(zip(leaves, found, strict=True)))


def _require_near(new: Tensor, old: Tensor, what: str, context: float) -> None:
    """Equal to about 1e-9 of its own scale, and 1e-10 of that of its context: gradients cancel against each other.

    The rest is for what is zero but for rounding: a norm of one value hands that on times 1 / sqrt(eps).
    """
    if new.shape != old.shape or new.dtype != old.dtype:
        raise Wrong(f"{what} is {tuple(new.shape)} {new.dtype} instead of {tuple(old.shape)} {old.dtype}")
    if not old.numel():
        return
    allowed = 1e-9 * float(old.abs().max()) + 1e-10 * context + 1e-11
    error = float((new.double() - old.double()).abs().max())
    if not error <= allowed:
        raise Wrong(f"{what} is off by {error:.3e} where {allowed:.3e} is allowed")


# Float32: the outputs, as accurate as the problem is well conditioned


def _check_float32(drawn: Drawn, captured: Captured, seed: int) -> None:
    """The error may be that of eager float32 and that of float32-sized changes of what goes in, a few times over."""
    graph = _narrowed(captured.graph)
    constants = {k: v.float() if v.dtype == torch.float64 else v for k, v in captured.constants.items()}
    program = lower(_rewritten(graph, seed).graph, captured.out_spec, constants).functions()
    model = copy.deepcopy(drawn.model).float()
    x = drawn.x.float()
    exact = _outputs(copy.deepcopy(model).double(), x.double(), seed)
    shaken = [_outputs(_shaken(copy.deepcopy(model).double(), i), x.double(), seed) for i in range(2)]
    eager = _outputs(copy.deepcopy(model), x, seed)
    new = _outputs(lambda value: _run(program, model, value), x, seed)
    for i, truth in enumerate(exact if _fits(eager) else []):
        ours, theirs = _error(new[i], truth), _error(eager[i], truth)
        conditioned = max(_error(s[i], truth) for s in shaken)
        allowed = 16 * (theirs + conditioned) + 64 * EPS32 * float(truth.abs().max()) + 1e-6
        if not ours <= allowed:
            raise Wrong(f"float32 output {i} is off by {ours:.3e}, eager by {theirs:.3e}; {allowed:.3e} is allowed")


def _outputs(function: Any, x: Tensor, seed: int) -> list[Tensor]:
    torch.manual_seed(seed)
    with torch.no_grad():
        return list(function(x))


def _error(value: Tensor, truth: Tensor) -> float:
    return float((value.double() - truth).abs().max()) if truth.numel() else 0.0


def _fits(values: list[Tensor]) -> bool:
    """Whether eager float32 got through without leaving its range, so that there is something to compare with."""
    return all(bool(v.isfinite().all()) for v in values if v.is_floating_point())


def _shaken(model: nn.Module, salt: int) -> nn.Module:
    """The model with every parameter moved by about one unit in the last place of float32."""
    generator = torch.Generator().manual_seed(salt)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1 + 2 * EPS32 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def _narrowed(graph: Graph) -> Graph:
    """The graph with float32 for float64 everywhere."""
    mapping: dict[Node, Node] = {}
    for node in [*graph.inputs, *graph.nodes()]:
        op: Any = node.op
        if getattr(op, "dtype", None) == torch.float64:
            op = replace(op, dtype=torch.float32)
        if isinstance(op, ops.Item):
            op = replace(op, result=op.result._replace(dtype=torch.float32))
        mapping[node] = make(op, *(None if a is None else mapping[a] for a in node.args))
    return replace(
        graph,
        inputs=tuple(mapping[n] for n in graph.inputs),
        outputs=tuple(mapping[o] if isinstance(o, Node) else o for o in graph.outputs),
        effects=tuple(mapping[e] for e in graph.effects),
    )


# Command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run chains from the command line; 1 when one failed or a rule never fired."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.chains", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many chains")
    parser.add_argument("--json", type=Path, help="write the summary here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tally = Tally()
    for seed in range(options.seed, options.seed + options.count):
        one = run([seed])
        tally.add(one)
        for failure in one.failures:
            print(f"seed {seed}: {failure['error']}\n{failure['trace']}\n{draw(seed).model}", flush=True)
    summary = {"first seed": options.seed, "torch": torch.__version__, **tally.summary()}
    counts = {key: summary[key] for key in ("chains", "redrawn", "untouched", "opaque")}
    print(f"{', '.join(f'{n} {key}' for key, n in counts.items())}, {len(tally.failures)} failed")
    for name, times in sorted(summary["fired"].items(), key=lambda item: -item[1]):
        print(f"{times / tally.chains:8.2%}  {name}")
    if options.json:
        options.json.write_text(json.dumps(summary, indent=2) + "\n")
    silent = not all(summary["fired"].values()) and options.count >= 1000
    return int(bool(tally.failures) or silent)


if __name__ == "__main__":
    sys.exit(main())
