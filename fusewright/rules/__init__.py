"""The algebra: one explicit ordered table of rules.  No rule knows another."""

from fusewright.rules import (
    attention,
    features,
    folding,
    gaps,
    normalization,
    padding,
    parts,
    pointwise,
    pooled_sums,
    pooling,
    sizes,
    slices,
    sums,
    views,
    windows,
)
from fusewright.rules.rule import Rule

RULES: tuple[Rule, ...] = (
    *attention.RULES,
    *normalization.RULES,
    *windows.RULES,
    *folding.RULES,
    *features.RULES,
    *gaps.RULES,
    *pooling.RULES,
    *padding.RULES,
    *parts.RULES,
    *sums.RULES,
    *pooled_sums.RULES,
    *pointwise.RULES,
    *sizes.RULES,
    *slices.RULES,
    *views.RULES,
)

__all__ = ["RULES", "Rule"]
