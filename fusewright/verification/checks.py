"""The named checks, one small function each, in the order of the table at the end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import combinations

import torch
from torch import Tensor, nn

from fusewright.runtime.memory import is_out_of_memory
from fusewright.verification import inputs as transforms
from fusewright.verification.compare import Comparison, Rules, Sample, compare, worst_of
from fusewright.verification.context import Context, Fault, NotApplicable, Run, same_form
from fusewright.verification.inputs import DISTRIBUTIONS, Call, is_real
from fusewright.verification.state import State
from fusewright.verification.verdict import Check

CheckFunction = Callable[[Context, str], Check]

# More near-ties than this share of all elements are worth a word.
_MANY_TIES = 0.01


def _row(name: str, result: Comparison, note: str = "") -> Check:
    notes = [note, result.detail]
    if result.ties:
        share = result.ties / max(result.elements, 1)
        notes.append(f"{result.ties} near-ties excluded" + (f", {share:.1%} of all" if share > _MANY_TIES else ""))
    return Check(name, result.ok, "; ".join(filter(None, notes)), result.error, result.tolerance)


def _size(context: Context, call: Call) -> str:
    full = context.example.batch()
    return f"batch {call.batch()} of {full}" if call.batch() != full else ""


# -- what the example shows -------------------------------------------------------------------------------------------


def _state_dict(context: Context, name: str) -> Check:
    """The candidate has the reference's state: the same keys and shapes."""
    expected, given = context.reference.state_dict(), context.candidate.state_dict()
    missing, surplus = sorted(expected.keys() - given.keys()), sorted(given.keys() - expected.keys())
    if missing or surplus:
        raise Fault(f"the keys differ: missing {missing[:4]}, unexpected {surplus[:4]}")
    for key, value in expected.items():
        if isinstance(value, Tensor) and value.shape != given[key].shape:
            raise Fault(f"{key} has shape {tuple(given[key].shape)}, not {tuple(value.shape)}")
    return Check(name, True, f"{len(expected)} entries")


def _example(context: Context, name: str) -> Check:
    """The outputs on the user's own inputs."""
    return _row(name, context.agreement(context.core), _size(context, context.core))


def _metadata(context: Context, name: str) -> Check:
    """Structure, shapes, dtypes, devices, strides and requires_grad of the outputs."""
    for grad in context.modes:
        eager, tried = context.eager(context.core, grad=grad), context.tried(context.core, grad=grad)
        same_form(eager, tried)
        for i, (a, b) in enumerate(zip(eager.outputs, tried.outputs, strict=True)):
            if not isinstance(a, Tensor):
                continue
            if a.layout == torch.strided and _strides(a) != _strides(b):
                raise Fault(f"output {i} has strides {b.stride()}, not {a.stride()}")
            if a.requires_grad != b.requires_grad:
                raise Fault(f"output {i} has requires_grad {b.requires_grad}, not {a.requires_grad}")
        _same_trained(context, eager, tried)
    return Check(name, True)


def _same_trained(context: Context, eager: Run, tried: Run) -> None:
    """Raises `Fault` where eager gives a gradient to something that no module has and that outlasts a call, and the
    candidate neither does nor has another of its shape, as a copy of the model would."""
    owned = {
        id(x) for module in (context.reference, context.candidate) for x in (*module.parameters(), *module.buffers())
    }
    theirs = {id(x) for x in tried.trained}
    lost = [x for x in eager.trained if id(x) not in owned | theirs]
    if not lost:
        return
    known = owned | {id(x) for x in eager.trained}
    copies = Counter(x.shape for x in tried.trained if id(x) not in known)
    again = {id(x) for x in context.eager(context.core, grad=True).trained}
    for x in lost:
        if copies[x.shape]:
            copies[x.shape] -= 1
        elif id(x) in again:  # what a call makes is another tensor each time
            raise Fault(
                f"a trainable tensor of shape {tuple(x.shape)} that is no parameter of the model gets no gradient; "
                "make it an attribute of the model"
            )


def _strides(x: Tensor) -> list[int]:
    return [step for size, step in zip(x.shape, x.stride(), strict=True) if size > 1]


def _gradients(context: Context, name: str, distribution: str | None = None) -> Check:
    """The gradients of every real input and every parameter, for random cotangents on every output."""
    if not context.options.gradients:
        raise NotApplicable("not asked for")
    call = context.core
    if distribution is not None:
        call = transforms.drawn(context.side, distribution, context.options.seed + 11)
    if not context.eager(call, grad=True).gradients:
        raise NotApplicable("nothing here has a gradient")
    return _row(name, context.agreement(call, grad=True), _size(context, call))


def _buffers(context: Context, name: str) -> Check:
    """The buffers (running statistics, counters) after one call, with gradients and without."""
    if not dict(context.reference.named_buffers()):
        raise NotApplicable("the model has no buffers")
    results = []
    for grad in context.modes:
        eager, tried, baselines, truth = context.sample(context.core, grad=grad)
        for key, expected in eager.buffers.items():
            given = tried.buffers.get(key)
            if given is None or given.shape != expected.shape or given.dtype != expected.dtype:
                raise Fault(f"buffer {key} is missing or of another shape or dtype")
            sample = Sample(given, tuple(run.buffers[key] for run in baselines.values()), truth.buffers[key])
            result = compare(sample, lambda times: (), context.rules())
            results.append(_named(result, f"buffer {key}"))
    return _row(name, worst_of(results))


def _named(result: Comparison, name: str) -> Comparison:
    return replace(result, detail=f"{name}: {result.detail}" if result.detail else "")


# -- what a call may not do -------------------------------------------------------------------------------------------


def _inputs_unmodified(context: Context, name: str) -> Check:
    """The inputs keep their bits, unless the reference writes to them too."""
    for grad in context.modes:
        eager, tried = context.eager(context.side, grad=grad), context.tried(context.side, grad=grad)
        for i, (before, a, b) in enumerate(zip(context.side.tensors(), eager.inputs, tried.inputs, strict=True)):
            if not _same_bits(before, a):
                result = compare(Sample(b, (a,), a), lambda times: (), Rules(looseness=8.0))
                if not result.ok:
                    raise Fault(f"input {i} is modified by the reference, and differently by the candidate")
            elif not _same_bits(before, b):
                raise Fault(f"input {i} is modified")
    return Check(name, True)


def _determinism(context: Context, name: str) -> Check:
    """Two runs from one state and one seed give the same bits."""
    grad = context.has_gradients
    if _same_run(context.tried(context.core, grad=grad), context.tried(context.core, grad=grad)):
        return Check(name, True)
    if not _same_run(context.eager(context.core, grad=grad), context.eager(context.core, grad=grad)):
        raise NotApplicable("eager itself gives other bits at each run")
    raise Fault("two runs on the same inputs give different bits, eager's do not")


def _same_run(a: Run, b: Run) -> bool:
    return a.values.keys() == b.values.keys() and all(_same_bits(a.values[key], b.values[key]) for key in a.values)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    a, b = a.detach(), b.detach()
    return a.shape == b.shape and torch.equal(a.isnan(), b.isnan()) and bool((a.eq(b) | a.isnan()).all())


def _outputs_kept(context: Context, name: str) -> Check:
    """An output survives the next call on other inputs, and shares no memory that eager's does not."""
    call = context.side
    first = context.tried(call)
    copies = {key: x.detach().clone() for key, x in first.values.items()}
    other = transforms.permuted(transforms.drawn(call, "normal", context.options.seed + 13), context.options.seed + 13)
    try:
        context.eager(other)
    except NotApplicable:
        other = call
    context.tried(other)
    for key, kept in copies.items():
        if not _same_bits(first.values[key], kept):
            raise Fault(f"{key} of one call is overwritten by the next call")
    shared = _aliases(context.candidate, context.tried(call)) - _aliases(context.reference, context.eager(call))
    if shared:
        raise Fault(f"{', '.join(sorted(shared))} in the candidate and not in eager")
    return Check(name, True)


def _aliases(module: nn.Module, run: Run) -> set[str]:
    owners = {_storage(x): f"input {i}" for i, x in enumerate(run.inputs)}
    owners |= {_storage(x): f"parameter {name}" for name, x in module.named_parameters()}
    owners |= {_storage(x): f"buffer {name}" for name, x in module.named_buffers()}
    owners.pop(0, None)
    found = {(key, owners.get(_storage(x))) for key, x in run.values.items()}
    pairs = combinations(sorted(run.values.items(), key=lambda item: item[0]), 2)
    found |= {(key, other) for (other, y), (key, x) in pairs if _storage(x) == _storage(y) != 0}
    return {f"{key} shares memory with {owner}" for key, owner in found if owner is not None}


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr() if x.layout == torch.strided else 0


def _poisoned_memory(context: Context, name: str) -> Check:
    """The result does not depend on what new memory happens to hold: it is all NaN here."""
    was, warn_only = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    _leave_nan(context.tried(context.side))
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        return _row(name, context.agreement(context.side, grad=context.has_gradients))
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill  # type: ignore[attr-defined]


def _leave_nan(run: Run) -> None:
    """Frees blocks of NaN of the outputs' sizes, for allocators that hand them out again without PyTorch's fill."""
    blocks = [torch.full_like(x, float("nan")) for x in run.values.values() if is_real(x) for _ in range(4)]
    del blocks


def _parameter_update(context: Context, name: str) -> Check:
    """An in-place edit of the parameters, as an optimizer makes, is seen by the next call."""
    edited = {key: p for key, p in context.reference.named_parameters() if is_real(p)}
    theirs = dict(context.candidate.named_parameters(remove_duplicate=False))
    if not edited:
        raise NotApplicable("the model has no parameters of real numbers")
    context.tried(context.side)
    before = context.state
    try:
        generator = torch.Generator().manual_seed(context.options.seed + 17)
        with torch.no_grad():
            for key, p in edited.items():
                p.mul_(1 + 0.1 * float(torch.rand((), generator=generator)))
                theirs[key].copy_(p)
        context.state = State(context.reference, context.candidate)
        return _row(name, context.agreement(context.side))
    finally:
        context.state = before
        before.restore()


# -- other inputs -----------------------------------------------------------------------------------------------------


def _batch(context: Context, name: str, size: int | None) -> Check:
    """Another leading size: one more than in the example, one, or none at all."""
    batch = context.side.batch()
    if not batch:
        raise NotApplicable("no input has a leading dimension")
    call = context.side.resized(batch + 1 if size is None else size)
    if call.batch() == batch:
        raise NotApplicable("the example has this size")
    return _row(name, context.agreement(call))


def _layout(context: Context, name: str, transform: Callable[[Call], Call]) -> Check:
    """The same values in another storage order, forward and backward."""
    call = transform(context.side)
    if all(a.stride() == b.stride() for a, b in zip(call.tensors(), context.side.tensors(), strict=True)):
        raise NotApplicable("no input has another storage order of this kind")
    return _row(name, context.agreement(call, grad=context.has_gradients))


def _distribution(context: Context, name: str) -> Check:
    """The outputs on inputs drawn from the distribution that gives the check its name."""
    if not any(is_real(x) for x in context.side.tensors()):
        raise NotApplicable("every input holds integers")
    seed = context.options.seed + 100 + list(DISTRIBUTIONS).index(name)
    return _row(name, context.agreement(transforms.drawn(context.side, name, seed)), _size(context, context.side))


def _permuted_integers(context: Context, name: str) -> Check:
    """Integer inputs hold other values, within the range that the example shows."""
    if all(is_real(x) for x in context.side.tensors()):
        raise NotApplicable("no input holds integers")
    return _row(name, context.agreement(transforms.permuted(context.side, context.options.seed + 19)))


def _planted(context: Context, name: str, value: float) -> Check:
    """NaN (or Inf) at one place of one input: it reaches what it reaches in eager, and nothing else."""
    kind = "nan" if math.isnan(value) else "inf"
    results = []
    for where, call in transforms.planted(context.side, value, context.options.seed + 23):
        results.append(_named(context.agreement(call, planted=kind), where))
    if not results:
        raise NotApplicable("every input holds integers")
    note = "" if context.options.exact or kind == "nan" else "an Inf may surface as NaN or the reverse"
    return _row(name, worst_of(results), note)


def _stream(context: Context, name: str) -> Check:
    """On a non-default CUDA stream the candidate waits for its inputs."""
    device = next((x.device for x in context.side.tensors() if x.is_cuda), None)
    if device is None:
        raise NotApplicable("no input is on a CUDA device")
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        tried = context.tried(context.side, within=_busy_stream(context.side, device))
    stream.synchronize()
    return _row(name, context.agreement(context.side, tried=tried))


@contextmanager
def _busy_stream(call: Call, device: torch.device) -> Iterator[None]:
    """Gives the stream work to finish before the inputs arrive: what runs on another stream overtakes them."""
    blocks = [torch.full_like(x, float("nan")) for x in call.tensors() if is_real(x)]
    del blocks
    delay = torch.zeros(4096, 4096, device=device)
    for _ in range(16):
        delay = delay @ delay
    yield


def _full_size(context: Context, name: str) -> Check:
    """The example at its full size against eager itself, where the float64 reference had to be cut."""
    if context.core.batch() == context.example.batch():
        raise NotApplicable("the example was checked at its full size")
    if context.bytes_per_row * (context.example.batch() or 1) > context.options.max_bytes:
        raise NotApplicable("does not fit in the memory allowed")
    try:
        result = context.against_eager(looseness=64.0).agreement(context.example)
    except Exception as error:
        if is_out_of_memory(error):
            raise NotApplicable("does not fit in memory") from error
        raise
    return _row(name, result, "against eager, so at a looser tolerance")


CORE = ("state_dict", "example", "gradients")
"""The checks that run whatever the time."""

CHECKS: tuple[tuple[str, CheckFunction], ...] = (
    ("state_dict", _state_dict),
    ("example", _example),
    ("gradients", _gradients),
    ("metadata", _metadata),
    ("buffers", _buffers),
    ("inputs unmodified", _inputs_unmodified),
    ("determinism", _determinism),
    ("outputs kept", _outputs_kept),
    ("parameter update", _parameter_update),
    ("batch + 1", partial(_batch, size=None)),
    ("batch 1", partial(_batch, size=1)),
    ("batch 0", partial(_batch, size=0)),
    ("transposed storage", partial(_layout, transform=transforms.transposed)),
    ("strided storage", partial(_layout, transform=transforms.strided)),
    ("channels-last", partial(_layout, transform=transforms.channels_last)),
    ("nan", partial(_planted, value=math.nan)),
    ("inf", partial(_planted, value=math.inf)),
    ("-inf", partial(_planted, value=-math.inf)),
    *((distribution, _distribution) for distribution in DISTRIBUTIONS),
    ("gradients, normal", partial(_gradients, distribution="normal")),
    ("gradients, mean 1", partial(_gradients, distribution="mean 1")),
    ("permuted integers", _permuted_integers),
    ("poisoned memory", _poisoned_memory),
    ("stream", _stream),
    ("full size", _full_size),
)
