"""What the test run says at its end."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The share of random chains in which each rule fired (``tests/fuzz``), over all workers."""
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, ())]
    blocks: list[dict[str, Any]] = [v for r in reports for k, v in getattr(r, "user_properties", ()) if k == "chains"]
    if not blocks:
        return
    counts = {key: sum(b[key] for b in blocks) for key in ("chains", "redrawn", "untouched", "opaque")}
    fired = sum((Counter(b["fired"]) for b in blocks), Counter())
    failed = sum(len(b["failures"]) for b in blocks)
    terminalreporter.section("random chains")
    terminalreporter.line(f"{', '.join(f'{n} {key}' for key, n in counts.items())}, {failed} failed")
    for name, times in sorted(fired.items(), key=lambda item: -item[1]):
        terminalreporter.line(f"{times / counts['chains']:8.2%}  {name}")
