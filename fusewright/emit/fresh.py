"""Runs a solution file beside its problem in a process of its own, where Fusewright cannot be imported.

    python -I fresh.py '{"problem": PATH, "solution": PATH, "device": "cpu", "target": "cpu", ...}'

Prints one line of JSON.  The kernels are built and must run; where a file for GPUs is tried on a CPU, the rewritten
program runs with the kernels' references in their place.  Needs nothing but PyTorch: what is common with the rest of
the package (the precision contract and its arithmetic) are files that import nothing else, loaded by their paths.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.machinery
import importlib.util
import json
import os
import platform
import re
import sys
import time
import tokenize
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

# What the field's harness allows.
HARNESS = {"atol": 1e-4, "rtol": 1e-4}
# Where one sample is not conclusive: so many more, on inputs moved by so many units in the last place; two if so many
# seconds have gone by.
SAMPLES, STEPS, SECONDS = 8, 4.0, 20.0


class Wrong(Exception):
    """What is wrong with a solution, in one sentence."""


class Differs(Wrong):
    """It may well be right, and is not what eager computes to the field's tolerance."""


def load(path: str, name: str, *, on_cpu: bool = False) -> Any:
    """A Python file as a module; its neighbours can be imported."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(path)))
    with tokenize.open(path) as file:
        source = file.read()
    if on_cpu:
        source = re.sub(r'(device=|device\()"cuda"', r'\1"cpu"', source)
    spec = importlib.machinery.ModuleSpec(name, None, origin=path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    exec(compile(source, path, "exec"), module.__dict__)
    return module


def ours(package: str, name: str) -> Any:
    """A file of `fusewright`, which cannot be imported here."""
    path = Path(__file__).parents[1] / package / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"the_{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


compare, numerics = ours("verification", "compare"), ours("verification", "numerics")
arguments, asserted = ours("emit", "arguments"), ours("verification", "asserted")
call, mapped, tensors = arguments.call, arguments.mapped, arguments.tensors


class Check:
    """One solution and its problem."""

    def __init__(self, asked: dict[str, Any]) -> None:
        self.device, self.target = asked["device"], asked["target"]
        self.rows, self.few, self.timed = asked["rows"], asked["few"], asked["time"]
        self.training, self.keeps_nan, self.sides = asked["training"], asked["keeps nan"], asked["sides"]
        self.exact = asked["exact"]
        self.problem = load(asked["problem"], "the_problem")
        self.solution = load(asked["solution"], "the_solution", on_cpu=self.device == "cpu")
        # Kernels for another device cannot run here.
        self.stands_in = self.solution.kernels_for(torch.device(self.device)) != self.target
        if self.stands_in and self.device == "cuda":
            raise Wrong(f"its kernels do not run on {torch.cuda.get_device_name()}")
        self.facts: dict[str, Any] = {"torch": torch.__version__, "python": platform.python_version()}
        self.ran = 0

    def run(self) -> dict[str, Any]:
        """Every check, in order; raises `Wrong` at the first that fails."""
        reference, new = self.built(self.problem, "Model"), self.built(self.solution, "ModelNew")
        self.same_state(reference, new)
        if self.facts.pop("Model") != self.facts.pop("ModelNew"):
            raise Wrong("ModelNew draws other random numbers than Model when it is built")
        whole = self.inputs()
        brief = not self.timed and self.device == "cpu"  # so that it takes a moment
        inputs = self.cut(whole) if brief else whole
        self.harness(reference, new, inputs)
        chosen = self.cut(inputs)
        self.watch_kernels()
        self.perturb(reference, new)
        if not self.stands_in:  # references are for one length each
            self.other_lengths(reference, new, chosen)
        self.against_float64(reference, new, chosen)
        if not self.ran:
            chosen = whole  # made for one batch alone
            self.harness(reference, new, whole)
            self.against_float64(reference, new, chosen)
        if not self.ran:
            raise Wrong("no call of the model reached the rewritten forward")
        if self.timed:
            self.time(reference, new, inputs)
        if self.keeps_nan:
            self.not_a_number(reference, new, chosen)
        return self.facts

    def built(self, module: Any, name: str) -> torch.nn.Module:
        """A model under the common seed."""
        torch.manual_seed(0)
        arguments = module.get_init_inputs() if hasattr(module, "get_init_inputs") else []
        torch.manual_seed(0)
        model: torch.nn.Module = call(getattr(module, name), arguments).to(self.device)
        self.facts[name] = torch.rand(1).item()
        return model.train(self.training) if model.training != self.training else model

    def inputs(self) -> Any:
        """The problem's inputs."""
        torch.manual_seed(1)
        return mapped(self.problem.get_inputs(), lambda x: x.to(self.device))

    def cut(self, inputs: Any) -> Any:
        """A smaller batch of the inputs."""
        return arguments.leading(inputs, self.rows, self.few)

    def same_state(self, reference: torch.nn.Module, new: torch.nn.Module) -> None:
        """One seed gives the same parameters and buffers."""
        ours, theirs = new.state_dict(), reference.state_dict()
        if list(ours) != list(theirs):
            raise Wrong("ModelNew has other parameters than Model")
        for name, value in theirs.items():
            if not torch.equal(torch.nan_to_num(value), torch.nan_to_num(ours[name])):
                raise Wrong(f"ModelNew starts with another {name} than Model under the same seed")
        new.load_state_dict(theirs)

    def harness(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> None:
        """What the field's harness does: both models as they were built, on the problem's own inputs."""
        theirs = mapped(inputs, torch.clone)
        with torch.no_grad():
            torch.manual_seed(2)
            expected = tensors(call(copy.deepcopy(reference), theirs))
            torch.manual_seed(2)
            self.synchronize()
            start = time.perf_counter()
            found = tensors(call(new, inputs))
            self.synchronize()
        self.facts["first call"] = time.perf_counter() - start
        for x, y in zip(tensors(theirs), tensors(inputs), strict=True):
            if not torch.equal(torch.nan_to_num(x), torch.nan_to_num(y)):
                raise Wrong("ModelNew leaves other values in its inputs than Model")
        for i, (e, f) in enumerate(zip(expected, found, strict=True)):
            if e.shape != f.shape or e.dtype != f.dtype:
                raise Wrong(f"output {i} is {f.dtype} {tuple(f.shape)}, not {e.dtype} {tuple(e.shape)}")
            tolerance = HARNESS if e.dtype in (torch.float32, torch.float64) else {"atol": 2e-2, "rtol": 2e-2}
            if e.is_floating_point() and not torch.allclose(e, f, equal_nan=True, **tolerance):
                most = (e - f).abs().max().item()
                if not self.eager_rounds(reference, new, inputs, i):
                    raise Differs(f"output {i} differs from eager's by up to {most:.2e} on the problem's own inputs")
                self.facts["eager rounds"] = max(most, self.facts.get("eager rounds", 0.0))

    def eager_rounds(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any, i: int) -> bool:
        """Whether output i of a file whose kernels use no tf32 is what eager computes, both without it."""
        if not self.exact:
            return False
        cudnn, products = torch.backends.cudnn, torch.backends.cuda.matmul
        kept = {name: getattr(cudnn, name) for name in ("enabled", "benchmark", "deterministic")}
        allowed, products.allow_tf32 = products.allow_tf32, False
        try:
            with torch.no_grad(), cudnn.flags(**kept, allow_tf32=False):
                both = []
                for model in (reference, new):
                    torch.manual_seed(2)
                    both.append(tensors(call(copy.deepcopy(model), mapped(inputs, torch.clone)))[i])
        finally:
            products.allow_tf32 = allowed
        expected, found = both
        return found.dtype == torch.float32 and torch.allclose(expected, found, equal_nan=True, **HARNESS)

    def perturb(self, reference: torch.nn.Module, new: torch.nn.Module) -> None:
        """Other weights for both: what is zero or one at the start must not stay hidden."""
        torch.manual_seed(5)
        with torch.no_grad():
            for p in reference.parameters():
                if p.is_floating_point():
                    p.add_(0.1 * torch.rand_like(p) * p.abs().mean().clamp(min=0.1))
        new.load_state_dict(reference.state_dict())

    def watch_kernels(self) -> None:
        """Counts the calls that the rewritten forward serves, with references in the place of kernels for elsewhere."""
        names = [name for name in vars(self.solution.ModelNew) if name.startswith("fused")]
        name = next((name for name in names if name.rstrip("_").endswith(f"_{self.target}")), names[0])
        fused = getattr(self.solution.ModelNew, name)

        def counted(*arguments: Any) -> Any:
            self.ran += 1
            return fused(*arguments)

        setattr(self.solution.ModelNew, name, counted)
        if self.stands_in:
            for name in [name for name in vars(self.solution) if name.endswith("_launch")]:
                own, shared = name.replace("_launch", "_reference"), re.sub("_[a-z]+_launch$", "_reference", name)
                setattr(self.solution, name, getattr(self.solution, own, None) or getattr(self.solution, shared))
            self.solution.covered = lambda model, *_, **__: self.solution.weights(model)
            self.solution.kernels_for = lambda _: self.target
            torch.cuda.device = contextlib.nullcontext  # type: ignore[assignment, misc]

    def against_float64(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> None:
        """Outputs and all gradients against those of the original in float64, by the precision contract."""
        first = self.sampled(reference, new, inputs)
        more: list[dict[str, list[Any]]] = []
        until = time.monotonic() + SECONDS

        def further() -> list[dict[str, list[Any]]]:
            """Samples of all tensors on inputs nearby."""
            while len(more) < (SAMPLES if time.monotonic() < until else 2):
                more.append(self.sampled(reference, new, mapped(inputs, self.nudged(len(more)))))
            return more

        for kind, samples in first.items():
            errors = {"eager": worst([(s.eager, s.truth) for s in samples])}
            errors["new"] = worst([(s.candidate, s.truth) for s in samples])
            self.facts.setdefault("errors", {})[kind] = errors
            for i, sample in enumerate(samples):
                found = compare.compare(sample, partial(of, further, kind, i), compare.Rules())
                if not found.ok:
                    raise Wrong(
                        f"{kind[:-1]} {i} is off against float64 by {found.error:.1e} of its size, beyond "
                        f"{found.tolerance:.1e}: {found.detail}"
                    )

    def other_lengths(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> None:
        """The same on inputs of other lengths that the file says it serves, short ones for the time that it takes."""
        for share in (0.0, 0.2):
            lengths = {dim: low + int(share * (high - low)) + 1 for dim, low, high in self.sides}
            before = self.ran
            if lengths:
                self.against_float64(reference, new, mapped(inputs, partial(arguments.resized, lengths=lengths)))
            if lengths and self.ran == before:
                raise Wrong(f"inputs with dimensions of {lengths} elements did not reach the rewritten forward")

    def sampled(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> dict[str, list[Any]]:
        """Outputs and gradients of the solution, of eager (and, where tf32 is allowed, on operands rounded to it), and
        in truth."""
        eager = self.gradients(copy.deepcopy(reference), inputs)
        found = self.gradients(copy.deepcopy(new), inputs)
        baselines, tf32 = [eager], numerics.tf32_allowed("eager")
        with numerics.WideArithmetic():
            truth = self.gradients(copy.deepcopy(reference).double(), mapped(inputs, arguments.wide))
        if self.device == "cuda" and any(tf32):
            with numerics.WideArithmetic(convolutions=tf32[0], matmuls=tf32[1]):
                baselines.append(self.gradients(copy.deepcopy(reference).double(), mapped(inputs, arguments.wide)))
        return {
            kind: [
                compare.Sample(value, tuple(b[kind][i] for b in baselines), truth[kind][i])
                for i, value in enumerate(found[kind])
            ]
            for kind in found
        }

    def nudged(self, seed: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Moves a tensor by about a rounding."""
        generator = torch.Generator(self.device).manual_seed(6 + seed)

        def nudge(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point():
                return x
            noise = 2 * torch.rand(x.shape, generator=generator, device=x.device, dtype=torch.float64) - 1
            return (x.double() * (1 + STEPS * torch.finfo(x.dtype).eps * noise)).to(x.dtype)

        return nudge

    def not_a_number(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> None:
        """A NaN in each input reaches the outputs that it reaches in eager, and no others."""

        def planted(x: torch.Tensor) -> torch.Tensor:
            x = x.clone(memory_format=torch.contiguous_format)
            if x.is_floating_point() and x.numel():
                x.view(-1)[x.numel() // 2] = float("nan")
            return x

        with torch.no_grad():
            torch.manual_seed(3)
            try:
                with asserted.OnHost():  # a GPU would end the process
                    expected = [e.cpu() for e in tensors(call(copy.deepcopy(reference), mapped(inputs, planted)))]
            except (RuntimeError, IndexError, ValueError):  # there are operations that refuse it
                return
            torch.manual_seed(3)
            found = tensors(call(copy.deepcopy(new), mapped(inputs, planted)))
        for i, (e, f) in enumerate(zip(expected, found, strict=True)):
            if not torch.equal(e.isnan(), f.isnan().cpu()):
                raise Wrong(f"output {i} has {int(f.isnan().sum())} NaN where eager has {int(e.isnan().sum())}")

    def gradients(self, model: torch.nn.Module, inputs: Any) -> dict[str, list[torch.Tensor]]:
        """Outputs, and gradients of every parameter and floating-point input for a fixed cotangent."""
        inputs = mapped(inputs, lambda x: x.detach().clone().requires_grad_(x.is_floating_point()))
        found, given = None, mapped(inputs, torch.clone)  # which the model may write into
        if isinstance(model, self.solution.ModelNew):  # kernels may serve calls without gradients only
            with torch.no_grad():
                torch.manual_seed(3)
                found = [y for y in tensors(call(copy.deepcopy(model), given)) if y.is_floating_point()]
        torch.manual_seed(3)
        given = mapped(inputs, torch.clone)
        outputs = [y for y in tensors(call(model, given)) if y.is_floating_point()]
        found = outputs if found is None else found
        leaves = [p for p in model.parameters() if p.requires_grad] + [x for x in tensors(inputs) if x.requires_grad]
        grown = [y for y in outputs if y.requires_grad]
        grads: list[torch.Tensor] = []
        if grown and leaves:
            generator = torch.Generator(self.device).manual_seed(4)
            whole = [torch.randint(-64, 65, y.shape, generator=generator, device=self.device) for y in grown]
            weights = [(w / 32).to(y.dtype) for w, y in zip(whole, grown, strict=True)]  # the same in every dtype
            some = torch.autograd.grad(grown, leaves, weights, allow_unused=True)
            grads = [torch.zeros_like(x) if g is None else g.to_dense() for g, x in zip(some, leaves, strict=True)]
        return {"outputs": [y.detach() for y in (*found, *outputs)], "gradients": grads}

    def time(self, reference: torch.nn.Module, new: torch.nn.Module, inputs: Any) -> None:
        """Medians of the forward, in turns, in milliseconds."""
        samples: dict[str, list[float]] = {"eager": [], "new": []}
        rounds, calls = (12, 5) if self.device == "cuda" else (5, 1)
        with torch.no_grad():
            for _ in range(rounds):
                for name, model in {"eager": reference, "new": new}.items():
                    call(model, inputs)
                    self.synchronize()
                    start = time.perf_counter()
                    for _ in range(calls):
                        call(model, inputs)
                    self.synchronize()
                    samples[name].append(1e3 * (time.perf_counter() - start) / calls)
        self.facts["milliseconds"] = {name: sorted(times)[len(times) // 2] for name, times in samples.items()}
        on_gpu = self.device == "cuda"
        self.facts["device"] = torch.cuda.get_device_name() if on_gpu else f"a CPU, {torch.get_num_threads()} threads"
        self.facts["cuda"] = torch.version.cuda

    def synchronize(self) -> None:
        """Waits for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()


def of(samples: Callable[[], list[dict[str, list[Any]]]], kind: str, index: int, times: int) -> list[Any]:
    """One tensor's samples; none where another number of `times` as many is asked for, for want of time."""
    return [sample[kind][index] for sample in samples()] if times == 1 else []


def worst(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    """The largest error of several tensors: root mean square, relative to what is expected.

    One that should be next to nothing (the gradient of a bias before a norm) is compared with a thousandth of the rest.
    """
    sizes = [size(truth) for _, truth in pairs]
    least = max(1e-3 * max(sizes, default=0.0), 1e-12)
    errors = [size(found.double() - truth.double()) for found, truth in pairs]
    return max((e / max(own, least) for e, own in zip(errors, sizes, strict=True)), default=0.0)


def size(x: torch.Tensor) -> float:
    """The root mean square."""
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def main() -> None:
    """Prints what came of the check that the first argument describes."""
    sys.modules["fusewright"] = None  # type: ignore[assignment]
    asked = json.loads(sys.argv[1])
    try:
        check = Check(asked)
        facts = check.run() | {"stands in": check.stands_in}
        print(json.dumps({"ok": True, **facts}))
    except Wrong as wrong:
        print(json.dumps({"ok": False, "reason": str(wrong), "differs": isinstance(wrong, Differs)}))


if __name__ == "__main__":
    main()
