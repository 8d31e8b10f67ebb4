"""A solution file tried as somebody who has nothing but PyTorch would: in a fresh process, see `emit.fresh`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fusewright.emit import fresh
from fusewright.errors import FusewrightError

# Rows of a batch that a solution is compared with float64 on, unless its kernels are for larger ones alone.
ROWS = {"cuda": 4, "cpu": 2}

# Seconds that a solution may take in its fresh process, building included.
SECONDS = 600


class Differs(FusewrightError):
    """A file does not compute what eager does to the field's tolerance, be it as exact or more so."""


def tried(
    problem: Path,
    solution: Path,
    device: str,
    *,
    target: str,
    timed: bool,
    training: bool = True,
    keeps_nan: bool = True,
    exact: bool = False,
    rows: Sequence[int | None] = (),
    sides: Mapping[int, tuple[int, int]] | None = None,
) -> dict[str, Any]:
    """What `fusewright.emit.fresh` finds out about a solution's part for `target`, on `device`, in a process of its
    own.  It is compared with float64 on so many leading `rows` of each tensor input (`None`: all; unnamed: few).
    An `exact` one, without tf32, may be as far from eager as eager is from itself without.

    Raises `FusewrightError` where it is wrong.
    """
    asked = {
        "problem": str(problem.resolve()),
        "solution": str(solution.resolve()),
        "device": device,
        "target": target,
        "rows": [*rows],
        "few": ROWS[device],
        "time": timed,
        "training": training,
        "keeps nan": keeps_nan,
        "exact": exact,
        "sides": [(dim, *lengths) for dim, lengths in (sides or {}).items()],
    }
    done = _in_a_fresh_process(json.dumps(asked))
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"ok": ')]  # among what the model prints
    if done.returncode != 0 or not lines:
        last = next(iter(reversed(done.stderr.strip().splitlines())), f"exit code {done.returncode}")
        raise FusewrightError(f"the solution file does not run in a fresh process: {last}")
    facts: dict[str, Any] = json.loads(lines[-1])
    if not facts.pop("ok"):
        kind = Differs if facts.get("differs") else FusewrightError
        raise kind(f"the solution file is wrong and was not kept: {facts['reason']}")
    return facts


def _in_a_fresh_process(asked: str) -> subprocess.CompletedProcess[str]:
    """Runs `emit.fresh` in an isolated interpreter for which nothing is built yet, so that the time it takes is known.

    Raises `FusewrightError` where it takes too long.
    """
    # An isolated interpreter may not find a PyTorch that was found through the environment.
    found = f"sys.path.append({str(Path(torch.__file__).parents[1])!r}); runpy.run_path({fresh.__file__!r}"
    command = [sys.executable, "-I", "-c", f"import runpy, sys; {found}, run_name='__main__')", asked]
    with tempfile.TemporaryDirectory(prefix="fusewright-") as built:
        environment = {"TORCH_EXTENSIONS_DIR": built, **os.environ}
        try:
            return subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environment
            )
        except subprocess.TimeoutExpired as error:
            raise FusewrightError(f"the solution file took more than {SECONDS} s in a fresh process") from error
