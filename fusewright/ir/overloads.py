"""What the schema of an ATen overload tells of memory, and what it leaves out."""

from __future__ import annotations

import torch
from torch._ops import OpOverload

# Composite operations have no alias annotation to rely on, and some return their argument; these never do.
_FRESH = frozenset(
    (
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
        *("linear", "matmul", "embedding", "embedding_bag", "scaled_dot_product_attention", "lstm", "gru"),
        *("batch_norm", "instance_norm", "layer_norm", "group_norm", "rms_norm"),
        *("max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d"),
        *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
        *("relu6", "selu", "square", "softmax", "log_softmax", "logsumexp", "var", "std"),
        *("stack", "concat", "cross_entropy_loss", "l1_loss", "kl_div", "poisson_nll_loss", "cosine_similarity"),
        *("margin_ranking_loss", "triplet_margin_loss", "hinge_embedding_loss", "cosine_embedding_loss"),
    )
)
# Others return views, or their argument, and have no annotation.
_UNMARKED = frozenset(("_unsafe_view", "unsafe_split", "unsafe_split_with_sizes", "lift"))
STATISTICS = ("running_mean", "running_var")


def allocates(overload: OpOverload) -> bool:
    """Whether its results are known to have memory of their own."""
    if any(result.alias_info is not None for result in overload._schema.returns):
        return False
    name = str(overload).split(".")[1]
    return name in _FRESH or not (name in _UNMARKED or _is_composite(overload))


def has_statistics(overload: OpOverload) -> bool:
    """Whether it may write to running statistics, which no schema tells."""
    return any(argument.name in STATISTICS for argument in overload._schema.arguments)


def _is_composite(overload: OpOverload) -> bool:
    """Whether an operation is made of others; assumed where PyTorch does not say."""
    ask = getattr(overload, "has_kernel_for_dispatch_key", None)
    key = getattr(torch._C.DispatchKey, "CompositeImplicitAutograd", None)
    try:
        return True if ask is None or key is None else bool(ask(key))
    except RuntimeError:  # the dispatcher has none of that name
        return True
