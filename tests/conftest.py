"""Which cases `make test` runs, and what the run says at its end."""

from __future__ import annotations

import gc
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from fusewright import peers, pipeline, trial
from fusewright.measure import compare
from fusewright.runtime.device import DeviceFacts, device_facts

# About a server's two cores.  Beside other tests a measured rate is off by more than decides which rewrite is taken.
CPU = DeviceFacts(
    "two cores", conv=6.5e10, matmul=7e10, wide=3.5e10, memory=5e9, reduce=2.2e10, window=6e8, launch=6e-6
)


# Of the cases of a test that is `sampled`, `make test` runs every so manieth, `make test-all` all of them.
EVERY = 6


@pytest.hookimpl(tryfirst=True)  # ahead of the selection by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What is `sampled` and not among these is slow: by its place among the cases, whatever else was asked for."""
    for item in items:
        sampled = item.get_closest_marker("sampled") is not None and isinstance(item, pytest.Function)
        if sampled and sum(set(item.callspec.indices.values())) % EVERY:  # one place for names that go together
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """What is there for as long as the tests are, PyTorch above all, is no garbage: to look through it again and again
    takes a twentieth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)


@pytest.fixture(autouse=True)
def fixed_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is planned for a CPU does not depend on what else it does."""

    def facts(device: torch.device) -> DeviceFacts:
        return CPU if device.type == "cpu" else device_facts(device)

    monkeypatch.setattr(pipeline, "device_facts", facts)


@pytest.fixture(autouse=True)
def briefly_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which path is the faster one is not what tests are about: nine rounds tell, not half a second of them."""
    for module in (trial, peers):
        monkeypatch.setattr(module, "compare", partial(compare, min_time=0.0))


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
