"""What a plan tells its reader besides what was done: precision notes, and what would allow more."""

from __future__ import annotations

import torch

from fusewright.ir import ops
from fusewright.pipeline import Built
from fusewright.plan import Declined
from fusewright.runtime import compiler


def precision_notes(built: Built) -> tuple[str, ...]:
    """How the rewritten arithmetic differs from the original's."""
    classes = {fired.exactness for fired in built.rewritten.fired}
    kernels = built.program.kernels
    notes: list[str] = []
    if built.masks:
        times = f"{built.masks} times" if built.masks > 1 else "once"
        notes.append(f"attention without a mask that hides nothing, or that the model does not have: {times}")
    if built.turned:
        times = f"{built.turned} convolutions" if built.turned > 1 else "a convolution"
        notes.append(f"channels last in memory: {times} by cuDNN, bias, residual and relu along with them")
    if built.batches:
        times = f"{built.batches} products" if built.batches > 1 else "a product"
        notes.append(f"values are read as they lie, not turned first: by {times} of every sample by one weight")
    if built.windows:
        times = f"{built.windows} convolutions are products" if built.windows > 1 else "a convolution is a product"
        notes.append(f"{times} of all windows by the weight: sums in another order; an Inf may surface as NaN")
    if built.features:
        times = f"{built.features} convolutions" if built.features > 1 else "a convolution"
        notes.append(f"taps along a dimension are features, added up behind it: {times}; sums in another order")
    others = built.masks or built.turned or built.batches or built.windows or built.features
    if classes == {"exact"} and not (kernels or others):
        notes.append("exact: the same bits as the original, non-finite values included")
    if "reassociates" in classes:
        notes.append("reassociates: the same real number, other rounding; an Inf may surface as NaN or the reverse")
    if "finite" in classes:
        notes.append("finite: a dependence was dropped, so a NaN of the original may vanish")
    if kernels:
        notes.append(
            "generated kernels: sums in another order and other rounding; an Inf may surface as NaN or the reverse"
        )
    rounding = {"contraction", *(("matmul", "product") if built.windows else ())}
    products = {choice.name for choice in built.choices if choice.family in rounding}
    if built.device.type == "cuda" and any(k.name in products and torch.float32 in k.dtypes for k in kernels):
        notes.append(
            "where the settings allow tf32, generated kernels round the float32 operands of their products to it"
        )
    summed = (ops.RangeSum, ops.Reduce)
    computed = {n.dtype for n in built.rewritten.graph.nodes() if n.varies and isinstance(n.op, summed)}
    if torch.float64 in computed and not any(n.dtype == torch.float64 for n in built.captured.graph.nodes()):
        notes.append("total sums are carried in float64 through the contraction that follows")
    return tuple(notes)


def telling(built: Built) -> tuple[Declined, ...]:
    """The declined rules a reader can do something about; that a rule for another case does not apply tells nothing."""
    signs = ("another user", "finite", "would not pay", "monotone", "not known", "varies")
    return tuple(d for d in built.rewritten.declined if any(sign in d.reason for sign in signs))


def advice(built: Built) -> tuple[str, ...]:
    """What the user could do to let more of the algebra apply."""
    found: list[str] = []
    for declined in built.rewritten.declined:
        if "another user" in declined.reason:
            wish = declined.reason.replace("has another", "had no other")
            found.append(f"{declined.where}: {declined.rule} would apply if {wish}")
        if "finite" in declined.reason:
            found.append(
                f"{declined.where}: for finite inputs {declined.rule} holds: is that intended? finite=True allows it"
            )
    if any(kernel.target == "cpu" for kernel in built.program.kernels) and (why := compiler.compiler().one_thread):
        found.append(f"generated kernels run in one thread: {why}")
    if built.captured.reasons:
        some = f"{len(built.captured.reasons)} operation{'s' * (len(built.captured.reasons) > 1)}"
        found.append(f"not understood, and so run as before: {some}")
    return tuple(dict.fromkeys(found))
