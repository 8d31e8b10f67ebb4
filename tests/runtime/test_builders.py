"""Many processes build the same kernels while some of them are killed."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from test_native import SOURCE, blend

from fusewright.runtime import cache
from fusewright.runtime.native import launcher

BUILD = """
import sys
sys.path[:0] = {path!r}
from test_builders import SOURCES
from fusewright.runtime import compiler
compiler.compiler()
print("ready", flush=True)
sys.stdin.readline()
for source in SOURCES:
    compiler.compile(source)
    print("built", flush=True)
"""
# Half a second each, most of it headers.
SOURCES = [f"#include <algorithm>\n#include <cmath>\n#include <vector>\n{SOURCE}// {i}\n" for i in range(6)]
PROCESSES, VICTIMS = 8, 5


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_builders_that_are_killed(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody hangs, all others finish, and what is kept is whole and what it should be."""
    monkeypatch.setenv(cache.ENVIRONMENT_VARIABLE, str(tmp_path / "cache"))
    code, draw = BUILD.format(path=[str(Path(__file__).parent)]), random.Random(seed)
    pipe = subprocess.PIPE
    started = [
        subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True, env=dict(os.environ))
        for _ in range(PROCESSES)
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    killed = []
    for victim in draw.sample(started, VICTIMS):
        time.sleep(draw.uniform(0.0, 0.8))
        victim.send_signal(signal.SIGKILL)
        killed.append(victim)
    said = [process.communicate(timeout=120)[0].count("built") for process in started]
    ends = [process.returncode for process in started]
    assert all(
        end == 0 and count == len(SOURCES) for p, end, count in zip(started, ends, said, strict=True) if p not in killed
    )
    in_the_midst = [p for p in killed if p.returncode == -signal.SIGKILL]
    assert in_the_midst, "they had all finished"
    found = sorted((tmp_path / "cache" / "kernels").glob("*.so"))
    assert len(found) == len(SOURCES) and all(cache.load(path) is not None for path in found)
    x, w = torch.randn(5, 3), torch.randn(3)
    for source in SOURCES:
        torch.testing.assert_close(launcher(blend(source=source))(x, w), x * w)
