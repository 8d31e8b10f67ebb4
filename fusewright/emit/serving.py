"""The part of a solution file that decides which calls its kernels serve."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from fusewright.codegen.aten import attribute
from fusewright.codegen.text import fill
from fusewright.emit import conditions, support
from fusewright.emit.architecture import architecture
from fusewright.emit.configuration import configuration
from fusewright.emit.draft import Draft, named_tensors, read_paths
from fusewright.emit.model_code import escaped
from fusewright.verification.numerics import tf32_allowed

_HERE = {"cuda": "is_cuda", "cpu": "is_cpu"}
_WITHOUT_GRADIENTS = "not torch.is_grad_enabled()"


def serving(drafts: Sequence[Draft], parameters: str) -> list[str]:
    """What decides whether the kernels serve a call with these `parameters`."""
    first = drafts[0]
    tensors, paths = dict(named_tensors(first.model)), read_paths(drafts)
    configured = configuration(first)
    held = ", ".join(attribute("model", path) for path in paths) + ("," if len(paths) == 1 else "")
    kinds = "".join(f"({tuple(tensors[p].shape)}, {tensors[p].dtype}), " for p in paths)
    devices = [line for draft in drafts for line in _device(draft)]
    autocast = " or ".join(f'torch.is_autocast_enabled("{draft.target}")' for draft in drafts)
    ordinary = fill(support.ORDINARY, conditions=devices, autocast=autocast)
    return [
        "# What the kernels were made for; a model that is configured otherwise runs its original forward.\n"
        f"MADE_FOR = {escaped(configured.literal)}",
        configured.text,
        "\n".join(
            fill(
                support.STATE,
                weights=first.indexed(f"({held})"),
                conditions=" and ".join([*_modes(first), configured.condition, *map(first.indexed, _shared(tensors))]),
            )
        ),
        f"# Shapes and dtypes of these tensors.\nKINDS = [{kinds.rstrip(', ')}]",
        "\n".join(ordinary),
        *_tf32(drafts),
        _covers(drafts, parameters),
        *([support.DERIVED] if any(draft.program.derived for draft in drafts) else []),
    ]


def _device(draft: Draft) -> list[str]:
    """The lines that recognize a device of the kind that the draft's kernels run on."""
    condition = f'device.type == "{draft.target}"'
    if draft.target == "cuda":
        condition += f" and {architecture(draft.kernels).condition}"
    return [f"if {condition}:", f'    return "{draft.target}"']


def _shared(tensors: Mapping[str, Tensor]) -> Iterable[str]:
    """That what was one tensor under several paths still is."""
    first: dict[int, str] = {}
    for path, tensor in tensors.items():
        if first.setdefault(id(tensor), path) != path:
            yield f"{attribute('model', path)} is {attribute('model', first[id(tensor)])}"


def _modes(draft: Draft) -> list[str]:
    """The mode that a model must be in, where that makes a difference."""
    if draft.either_mode:
        return []
    quantifier = "all" if draft.model.training else "not any"
    return [f"{quantifier}(m.training for m in model.modules())"]


def _tf32(drafts: Sequence[Draft]) -> list[str]:
    """The function that says whether the settings allow what kernels do, where they round to tf32 by these settings."""
    setting = next((s for s in map(tf32_setting, drafts) if s is not None), None)
    if setting is None:
        return []
    operations = {"cuda.matmul": "matrix products", "cudnn.conv": "convolutions"}[setting]
    return ["\n".join(fill(support.TF32, operations=operations, setting=setting))]


def tf32_setting(draft: Draft) -> str | None:
    """The setting of PyTorch's that a draft's kernels follow where they round to tf32, if any."""
    if draft.target == "cpu" or draft.precision != "eager":
        return None
    families = {choice.name: choice.family for choice in draft.plan.kernels}
    wide = {families[k.name] for k in draft.kernels if torch.float32 in k.dtypes}
    convolutions, products = tf32_allowed("eager")
    if products and wide - {"range reduction", "stream"}:  # the rarer setting; convolutions go along with it
        return "cuda.matmul"
    return "cudnn.conv" if convolutions and "contraction" in wide else None


def _covers(drafts: Sequence[Draft], parameters: str) -> str:
    """The function that looks at a call."""
    inputs = drafts[0].inputs
    tensors = ", ".join(inputs.tensors)
    device = f"{inputs.tensors[0]}.device"
    checks = ["own is not None", *inputs.conditions, f"kernels_for({device})"]
    checks.append(f"ordinary({device}, {tensors}, *own)")
    checks += _everywhere(drafts, _shapes)
    checks.append("[(w.shape, w.dtype) for w in own] == KINDS")
    checks += _everywhere(drafts, lambda draft: ["tf32_allowed()"] if tf32_setting(draft) else [])
    modes = list(_everywhere(drafts, _gradient_modes))
    # On a GPU whatever runs before the first kernel is time that a backward cannot hide.
    first = [_WITHOUT_GRADIENTS] if modes == [_WITHOUT_GRADIENTS] else []
    checks += [] if first else modes
    joined = "\n        and ".join(checks)
    plain = " and ".join([*first, "called_plainly()"])
    return (
        f"def covered(model: Model, {parameters}) -> tuple[torch.Tensor, ...] | None:\n"
        '    """The model\'s `weights` where the kernels were made for a call; `None` where the original runs."""\n'
        f"    own = weights(model) if {plain} else None\n    fits = (\n        {joined}\n    )\n"
        "    return own if fits else None"
    )


def _shapes(draft: Draft) -> list[str]:
    """What the tensor inputs must be."""
    tensors, guard = draft.inputs.tensors, draft.guard
    each = [
        c for i, name in enumerate(tensors) for c in conditions.tensor_conditions(name, guard, i, draft.entry.sides)
    ]
    return [*each, *conditions.size_conditions(tensors, guard)]


def _everywhere(drafts: Sequence[Draft], of: Callable[[Draft], list[str]]) -> Iterable[str]:
    """Conditions that hold for every draft as they are, those of some only on their devices."""
    found = {draft.target: of(draft) for draft in drafts}
    first = drafts[0].inputs.tensors[0]
    for condition in dict.fromkeys(c for own in found.values() for c in own):
        exempt = [target for target, own in found.items() if condition not in own]
        yield f"({first}.{_HERE[exempt[0]]} or {condition})" if exempt else condition


def _gradient_modes(draft: Draft) -> list[str]:
    """Which calls the kernels measured slower for."""
    modes = draft.entry.modes
    wants = " or ".join(f"{name}.requires_grad" for name in draft.inputs.tensors)
    if {"forward+backward", "with input gradients"} <= modes:
        return []
    if "forward+backward" in modes:
        return [f"not (torch.is_grad_enabled() and ({wants}))"]
    if "with input gradients" in modes:
        return [f"(not torch.is_grad_enabled() or {wants})"]
    return [_WITHOUT_GRADIENTS]
