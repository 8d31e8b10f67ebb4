"""One call of one model on trial: variants built, verified, measured; what is right and faster is kept."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fusewright import advice
from fusewright.capture.inference import has_other_ways
from fusewright.dispatch import Args, Entry, Kwargs, Options, Runner, Sides, State, guard_of
from fusewright.errors import CaptureError
from fusewright.ir.memory_order import follow_alike, follows_inputs
from fusewright.ir.types import main_device
from fusewright.measure import compare, forward_call, share_of_host, training_call
from fusewright.module import attach
from fusewright.pipeline import Built, build, kernel_target
from fusewright.plan import Kept, Mode, Plan
from fusewright.reduced import reduced, shape
from fusewright.rules import attention
from fusewright.runtime.operators import written_out
from fusewright.sides import free_sides, path_is_one
from fusewright.tree import flat_tensors, tree_flatten, tree_map
from fusewright.tuning import Ways
from fusewright.verification import Verdict
from fusewright.verification import verify as run_verification
from fusewright.verification.asserted import OnHost
from fusewright.verification.context import summary
from fusewright.verification.state import preserved

Progress = Callable[[str], None]

# A rewritten path is kept only when its median is below the original's by this share: less is noise.
FASTER = 0.98

# The share of an estimate that has to be saved before it is believed.
SURE = 0.9

# Where a host is done launching after less than this share of a call, the GPU does not wait for it.  A recording holds
# the memory of a call, and has to save more than noise.  Where the program is served anyway, a recording of it that is
# no slower than noise goes first: a host that is busier than now would make the GPU wait for launches.
BOUND, WORTH, EVEN = 0.5, 0.95, 1.01

# Models estimated to take longer than this many seconds are verified at a smaller side: a verification is some hundred
# runs, most of them in float64.
SLOW = 0.0005

# After so many seconds no further check of a verification is started; the plan lists those that were not.
SECONDS = 30.0

# So many rules that had rivals are also tried without, where the program was built in fewer than so many seconds.
MOST_VARIANTS, PATIENCE = 2, 30.0

# Rules whose results call what is no part of a solution file, for which `sides` are asked.
LIBRARIES = frozenset(rule.name for rule in attention.RULES)

AS_IT_WAS = "no rule applies"
KEPT = "; the original is kept"
OTHER_WAY = "PyTorch computes another way where nothing has a gradient, which the program follows"
MODES: tuple[Mode, ...] = ("forward", "forward+backward", "with input gradients")

_UNNAMED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
_REST = inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True)
class Trial:
    """One call of one model, to be judged; or, without `gradients`, one in which nothing has any, `because` of what
    others are left to the original.  The `ways` to cut its groups are found once for all programs."""

    model: nn.Module
    args: Args
    kwargs: Kwargs
    options: Options
    progress: Progress
    ways: dict[Any, Ways] = field(default_factory=dict)
    gradients: bool = True
    because: str = OTHER_WAY

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return main_device(t.device for t in flat_tensors(self.args, self.kwargs))

    @property
    def inputs(self) -> Any:
        """The example inputs as `verify` and `measure` take them: all positional, or all by name."""
        if not (self.args and self.kwargs):
            return dict(self.kwargs) if self.kwargs else self.args
        bound = inspect.signature(self.model.forward).bind(*self.args, **self.kwargs)
        kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
        if any(kinds[name] in _UNNAMED for name in bound.arguments):
            raise CaptureError(f"{type(self.model).__name__} takes arguments that have no name beside named ones")
        rest: Mapping[str, Any] = next(
            (bound.arguments[n] for n, kind in kinds.items() if kind is _REST and n in bound.arguments), {}
        )
        return {**{name: value for name, value in bound.arguments.items() if kinds[name] is not _REST}, **rest}


def _judge(trial: Trial, built: Built, plan: Plan) -> Entry:
    """Verify and measure a rewritten program; keep it where it is right and faster."""
    candidate, runner = _candidate(trial, built)
    if trial.options.verify:
        verdict = _verified(trial, built)
        plan = replace(plan, verdict=verdict)
        if not verdict.ok:
            failed = next(row for row in verdict.rows if row.ok is False)
            reason = f"verification failed ({failed.name}: {failed.detail}){KEPT}"
            return Entry(plan=replace(plan, status="unchanged", reason=reason))
    with preserved(trial.model):
        recorded = _recorded(trial, built, candidate)
        kept = _measured(trial, built, candidate, recorded)
    if not _is_rewritten(built):
        kept = tuple(replace(k, path="original", reason=AS_IT_WAS) if k.path == "rewritten" else k for k in kept)
    forward = next(k for k in kept if k.mode == "forward")
    if forward.path == "recorded":
        runner = runner.as_recorded(_most_recorded(trial), alone=_is_rewritten(built) and _is_faster(forward))
    modes = {k.mode for k in kept if k.path != "original"}
    if "forward" in modes and runner.alone and trial.gradients and not _occurs(trial, "forward+backward"):
        modes.add("forward+backward")  # gradients are on, and nothing has one: that is a forward
    if not modes:
        reason = f"the rewritten program was not faster{KEPT}"
        reason = reason if _is_rewritten(built) else f"{AS_IT_WAS}, and a CUDA graph was not faster"
        return Entry(plan=replace(plan, status="unchanged", reason=reason, kept=kept))
    return Entry(runner, frozenset(modes), replace(plan, kept=kept), _sides(trial, built))


def _is_rewritten(built: Built) -> bool:
    """Whether the program differs from the model at all, if only in what is derived ahead of calls."""
    program = built.program
    return bool(built.rewritten.fired or program.kernels or program.derived or built.masks or _is_turned(built))


def _is_turned(built: Built) -> bool:
    """Whether values are read or written in other orders than the model's, though no rule says so."""
    return bool(built.turned or built.batches or built.windows or built.features)


def _sides(trial: Trial, built: Built) -> Sides:
    """The other lengths of its input that a program serves, where somebody wants to know."""
    tensors = flat_tensors(trial.args, trial.kwargs)
    if not trial.options.sides or len(tensors) != 1:
        return Sides()

    def on(x: Tensor) -> tuple[Args, Kwargs]:
        args, kwargs = tree_map(lambda value: x if value is tensors[0] else value, (trial.args, dict(trial.kwargs)))
        return args, kwargs

    def again(x: Tensor) -> Built:
        other = replace(trial, args=on(x)[0], kwargs=on(x)[1])
        return _built(other, built, mode="always", only=frozenset(shape(built)[0]))

    with preserved(trial.model):
        return free_sides(tensors[0], built, again, lambda x, ranges: path_is_one(trial.model, *on(x), x, ranges))


def _candidate(trial: Trial, built: Built, *, recorded: bool = False) -> tuple[nn.Module, Runner]:
    """A module that runs `built` on every call it is valid for, `recorded` where it can be."""
    graph = built.captured.graph
    shapes = tuple(n.shape for n in graph.inputs)
    # a kernel writes in one order, and so do some operations that rules leave, where others follow their operands
    rows = bool(built.program.kernels) or _is_turned(built) or not follow_alike(graph, built.rewritten.graph)
    ordered = rows and follows_inputs(graph)
    guard = guard_of(trial.args, trial.kwargs, shapes, graph.symbols, ordered=ordered)
    runner = Runner(built.program, guard, trial.options.precision, _most_recorded(trial) if recorded else 0)
    state = State(trial.model, trial.options)
    state.add(Entry(runner, frozenset(MODES)), trial.args, trial.kwargs)
    return attach(trial.model, state), runner


def _is_worth_recording(trial: Trial, built: Built) -> bool:
    """Whether a GPU waits for its host to launch what a forward launches."""
    if trial.options.graphs == "never" or trial.device.type != "cuda" or not built.program.repeatable:
        return False
    if any(t.device != trial.device for t in flat_tensors(trial.args, trial.kwargs)):
        return False
    if trial.options.graphs == "always" or not trial.options.measure:
        return trial.options.graphs == "always"
    call = forward_call(_candidate(trial, built)[0], trial.inputs)
    with preserved(trial.model):
        return share_of_host(call, trial.device) > BOUND


def _recorded(trial: Trial, built: Built, candidate: nn.Module) -> nn.Module | None:
    """A module that replays the forward of `built`, bit for bit the same; `None` where that is not to be had."""
    if not _is_worth_recording(trial, built):
        return None
    trial.progress("recording the forward")
    module, runner = _candidate(trial, built, recorded=True)
    assert runner.recorder is not None
    with torch.no_grad():
        for args, kwargs in ((trial.args, trial.kwargs), tree_map(_other, (trial.args, dict(trial.kwargs)))):
            if built.program.looks_up and not _answers(candidate, args, kwargs):
                return None
            want = candidate(*args, **kwargs)
            for _ in range(3):  # the program twice, recorded by then, and a replay
                found = module(*args, **kwargs)
            if not _have_same_bits(found, want):
                return None
    return module if runner.recorder.replays else None


def _answers(module: nn.Module, args: Args, kwargs: Kwargs) -> bool:
    """Whether a module has an answer: where it has none, a GPU would end the process."""
    try:
        with OnHost(written_out):
            module(*args, **kwargs)
    except (IndexError, ValueError):
        return False
    return True


def _most_recorded(trial: Trial) -> int:
    """Elements of inputs up to which a recording was found worth it, or is wanted."""
    if trial.options.graphs == "always":
        return sys.maxsize
    return sum(t.numel() for t in flat_tensors(trial.args, trial.kwargs))


def _other(value: Any) -> Any:
    """Other numbers of the same kind; what may be an index stays one."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return torch.empty_like(value).copy_(value.detach().flip(tuple(range(value.ndim)))).mul_(0.75)


def _have_same_bits(found: Any, want: Any) -> bool:
    try:
        both = zip(tree_flatten(found)[0], tree_flatten(want)[0], strict=True)
        for one, other in both:
            if isinstance(one, Tensor):
                assert_close(one, other, rtol=0, atol=0, equal_nan=True, check_stride=True)
            elif one is not other and one != other:
                return False
    except (AssertionError, ValueError):
        return False
    return True


def _verified(trial: Trial, built: Built) -> Verdict:
    """All checks; of a slow model at a smaller side, and then the example at full size against eager."""

    def again(args: Args, kwargs: Kwargs) -> Built:
        """Built by cost like the original, else by the very rules that fired on it."""
        smaller = replace(trial, args=args, kwargs=kwargs)
        found = _built(smaller, built)
        if shape(found) == shape(built):
            return found
        return _built(smaller, built, mode="always", only=frozenset(shape(built)[0]))

    smaller = None
    if built.before.seconds > SLOW:
        with preserved(trial.model):
            smaller = reduced(trial.model, trial.args, trial.kwargs, built, again)
    if smaller is None:
        return _checked_against_float64(trial, built)
    args, kwargs, small = smaller
    verdict = _checked_against_float64(replace(trial, args=args, kwargs=kwargs), small)
    full = _verify(trial, built, checks=("example", "metadata"), truth="eager")
    rows = tuple(replace(row, name=f"{row.name} at full size") for row in full.rows)
    sizes = ", ".join(str(tuple(t.shape)) for t in flat_tensors(args, kwargs))
    checked = f"{verdict.checked}, on inputs cut to {sizes}; then against eager at full size"
    return Verdict((*verdict.rows, *rows), checked, verdict.seconds + full.seconds)


def _checked_against_float64(trial: Trial, built: Built) -> Verdict:
    return _verify(trial, built, cut_batch=bool(built.captured.graph.symbols))


def _verify(trial: Trial, built: Built, **how: Any) -> Verdict:
    candidate, runner = _candidate(trial, built)
    exact = not (built.program.kernels or built.masks or _is_turned(built))
    exact = exact and all(fired.exactness == "exact" for fired in built.rewritten.fired)
    verdict = run_verification(
        trial.model,
        candidate,
        trial.inputs,
        training=trial.model.training,
        precision=trial.options.precision,
        exact=exact,
        seconds=SECONDS,
        gradients=trial.gradients,
        progress=lambda name: trial.progress(f"verifying: {name}"),
        **how,
    )
    assert runner.calls > 0, "the verification never ran the program"
    return verdict


def _measured(trial: Trial, built: Built, candidate: nn.Module, recorded: nn.Module | None = None) -> tuple[Kept, ...]:
    """Which path serves calls of each mode."""

    def path(mode: Mode) -> Kept:
        if mode != "forward" and not trial.gradients:
            return Kept(mode, "original", trial.because)
        if not trial.options.measure:
            return _estimated(trial, built, mode)
        return _kept(trial, candidate, mode, recorded if mode == "forward" else None)

    if not trial.options.measure:
        kept = tuple(map(path, MODES))
        return kept if recorded is None else (Kept("forward", "recorded", "as asked; not measured"), *kept[1:])
    modes = MODES if _is_rewritten(built) else MODES[:1]
    return tuple(path(mode) for mode in modes if _occurs(trial, mode))


def _estimated(trial: Trial, built: Built, mode: Mode) -> Kept:
    """The path that serves calls of `mode` where nothing is measured.

    A backward pass costs about two forward passes, and behind a kernel one more that computes again what it kept to
    itself: that pays where the algebra left less to do, not where kernels alone make the forward faster.
    """
    if _as_asked(trial.options):
        return Kept(mode, "rewritten", "as asked; not measured")
    with_gradients = built.after.seconds + 3 * built.recomputed.seconds
    if mode != "forward" and built.program.kernels and with_gradients > SURE * 3 * built.before.seconds:
        return Kept(mode, "original", "by the cost model, computing the forward again costs what it saves")
    return Kept(mode, "rewritten", "by the cost model; not measured")


def _as_asked(options: Options) -> bool:
    """Whether a rewritten program is wanted whatever it costs."""
    return "always" in (options.rewrite, options.kernels)


def _occurs(trial: Trial, mode: Mode) -> bool:
    """Whether the model can be called in this mode with anything to differentiate."""
    if mode == "forward+backward":
        return any(p.requires_grad for p in trial.model.parameters())
    return mode == "forward" or any(t.is_floating_point() for t in flat_tensors(trial.args, trial.kwargs))


def _kept(trial: Trial, candidate: nn.Module, mode: Mode, recorded: nn.Module | None = None) -> Kept:
    """The path that serves calls of `mode`, all measured in turns."""

    def call(module: nn.Module) -> Callable[[], object]:
        if mode == "forward":
            return forward_call(module, trial.inputs)
        return training_call(module, trial.inputs, input_gradients=mode == "with input gradients")

    trial.progress(f"measuring {mode}")
    try:
        call(trial.model)()
    except ValueError as error:  # nothing to differentiate after all
        return Kept(mode, "original", str(error))
    except Exception as error:  # cuDNN's recurrent networks have no gradients in evaluation mode
        return Kept(mode, "original", f"the model itself raises {summary(error)}")
    if not all(buffer.is_leaf for buffer in trial.model.buffers()):
        return Kept(mode, "original", "a buffer keeps what a call computed, and a second backward would raise")
    calls = {"original": call(trial.model), "rewritten": call(candidate)}
    if recorded is not None:
        calls["recorded"] = call(recorded)
    samples = compare(calls, device=trial.device, rounds=9, max_time=8.0)
    replayed = samples["recorded"].median if recorded is not None else None
    return _chosen(trial.options, mode, samples["original"].median, samples["rewritten"].median, replayed)


def _chosen(options: Options, mode: Mode, before: float, after: float, replayed: float | None = None) -> Kept:
    """The path that serves calls of `mode`, by the seconds of original, rewritten and recorded forward."""
    seconds = (before, after, replayed)
    faster = after < FASTER * before
    if replayed is not None:
        if options.graphs == "always" or replayed < WORTH * min(before, after):
            return Kept(mode, "recorded", "a CUDA graph was faster", *seconds)
        if replayed < EVEN * after and faster:
            return Kept(mode, "recorded", "a CUDA graph was as fast, and needs less of its host", *seconds)
    if _as_asked(options):
        return Kept(mode, "rewritten", "as asked", *seconds)
    if faster:
        return Kept(mode, "rewritten", "measured faster", *seconds)
    return Kept(mode, "original", "the rewritten program was not faster", *seconds)


def _is_faster(kept: Kept) -> bool:
    """Whether the rewritten program is the faster one where it is not replayed."""
    return kept.original is None or kept.rewritten is None or kept.rewritten < FASTER * kept.original


def tried(trial: Trial, draft: Plan) -> Entry:
    """What building, verifying and measuring come to; raises `CaptureError` where it cannot be built.

    Where the way with gradients is refused, and there may be another one without, or gradients are wrong, calls without
    are tried by themselves.
    """
    entry = _tried(trial, draft)
    plan = entry.plan
    if plan is None or plan.verdict is None or plan.verdict.ok:
        return entry
    without = replace(trial, gradients=False)
    if any(check.name == "gradients" for check in plan.verdict.failed):
        without = replace(without, because=plan.reason.removesuffix(KEPT))
    elif not has_other_ways(trial.model):
        return entry
    other = _tried(without, draft)
    if other.runner is not None or other.plan is None:
        return other if other.runner is not None else entry
    reason = f"{plan.reason.removesuffix(KEPT)}; without gradients, {other.plan.reason}"
    return replace(entry, plan=replace(plan, reason=reason, refused=other.plan.refused, kept=other.plan.kept))


def _tried(trial: Trial, draft: Plan) -> Entry:
    trial.progress("capturing and rewriting")
    begun = time.monotonic()
    built = _built(trial)
    patient = time.monotonic() - begun < PATIENCE
    plan = _described(draft, built)
    if not _is_rewritten(built) and not _is_worth_recording(trial, built):
        reason = "no rule applies" if not plan.declined else "no rule that applies would pay"
        return Entry(plan=replace(plan, status="unchanged", reason=reason))
    entries = (
        _judge(trial, variant, _described(draft, variant))
        for variant in _variants(trial, built, MOST_VARIANTS if patient else 0)
    )
    first: Entry | None = None
    refused: list[str] = []
    for entry in entries:
        if entry.plan is None or entry.plan.verdict is None:
            return entry
        if entry.plan.verdict.ok:
            return replace(entry, plan=replace(entry.plan, refused=tuple(refused)))
        first = first or entry
        refused.append(_refusal(entry.plan))
    assert first is not None
    return first


def _refusal(plan: Plan) -> str:
    """What a program that came before the one kept consisted of, and what was wrong with it."""
    kernels = [choice.name for choice in plan.kernels if choice.path == "generated"]
    made_of = ", ".join([*dict.fromkeys(fired.rule for fired in plan.rules), *kernels]) or "the same operations"
    return f"{made_of}: {plan.reason.removesuffix(KEPT)}"


def _built(trial: Trial, like: Built | None = None, **changes: Any) -> Built:
    """The passes' work on the trial's call; `like` another build: without its rules left out, with its decisions."""
    options = trial.options
    wanted: dict[str, Any] = {
        "mode": options.rewrite,
        "finite": options.finite,
        "kernels": options.kernels,
        "precision": options.precision,
        "windows": "measured" if options.measure else "estimated",
        "measure": options.measure and like is None,
        "target": options.target,
        "without": LIBRARIES if options.sides else frozenset(),
        "wishes": options.wishes,
        "ways": trial.ways,
        "gradients": trial.gradients,
        "plain": options.sides,
        "progress": trial.progress,
    }
    if like is not None:
        kernels = options.kernels if like.program.kernels else "never"
        wanted |= {"without": like.without, "decisions": like.decisions, "kernels": kernels}
        wanted |= {"sums_apart": like.sums_apart, "last": bool(like.turned)}
        wanted |= {} if like.windows or like.features else {"windows": "never"}
    return build(trial.model, trial.args, trial.kwargs, **wanted | changes)


def _variants(trial: Trial, built: Built, most: int) -> list[Built]:
    """`built`, and what becomes of it without rules that had rivals, `most` of them, with convolutions for products of
    windows and for taps as features, with window sums apart, without kernels, or with channels last; the fastest first
    where that may be measured."""
    variants, options = [built], trial.options
    while len(variants) <= most:
        contested = next((fired.rule for fired in variants[-1].rewritten.fired if fired.rivals), None)
        other = None if contested is None else _built(trial, without=variants[-1].without | {contested})
        if other is None or not other.rewritten.fired:
            break
        variants.append(other)
    if (built.windows or built.features) and "always" not in (options.rewrite, options.kernels):
        convolved = _built(trial, windows="never")
        variants += [convolved] if _is_rewritten(convolved) else []
    if built.formed and most:
        variants.append(_built(trial, sums_apart=True))
    if built.program.kernels and options.kernels == "auto":
        plain = _built(trial, kernels="never")
        variants += [plain] if plain.rewritten.fired or _is_worth_recording(trial, plain) else []
    if built.device.type == "cuda" and options.kernels == "auto" and options.measure and not options.sides:
        last = _built(trial, last=True)
        variants += [last] if last.turned else []
    if len(variants) == 1 or not options.measure:
        return variants
    trial.progress("comparing variants")

    def called(variant: Built) -> Callable[[], object]:
        module, _ = _candidate(trial, variant, recorded=_is_worth_recording(trial, variant))
        return forward_call(module, trial.inputs)

    calls = {i: called(variant) for i, variant in enumerate(variants)}
    with preserved(trial.model):
        seconds = compare(calls, device=trial.device, min_time=0.05, rounds=5, max_time=5.0)
    return [variants[i] for i in sorted(seconds, key=lambda i: seconds[i].median)]


def _described(draft: Plan, built: Built) -> Plan:
    return replace(
        draft,
        status="rewritten",
        before=built.before,
        after=built.after,
        rules=built.rewritten.fired,
        declined=advice.telling(built),
        opaque=tuple(built.captured.reasons),
        kernels=built.choices,
        no_kernels=kernel_target(built.device) or "",
        precision=advice.precision_notes(built),
        advice=advice.advice(built),
        program=built.program.source,
    )
