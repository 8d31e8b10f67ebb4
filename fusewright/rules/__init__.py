"""The algebra: one explicit ordered table of rules.  No rule knows another."""

from fusewright.rules import features, windows
from fusewright.rules.rule import Rule

RULES: tuple[Rule, ...] = (*windows.RULES, *features.RULES)

__all__ = ["RULES", "Rule"]
