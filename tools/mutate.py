"""Mutation testing of the rules: does a test fail when a condition or a replacement is wrong?

    python tools/mutate.py                                   every mutant of every file
    python tools/mutate.py --count 300 --seed 1 --jobs 2     a sample
    python tools/mutate.py --file fusewright/rules/windows.py --json benchmarks/results/mutation.json

Each mutant runs in a forked child that imports the project anew with one file changed, and runs the tests that concern
the file until the first one fails.  Results are kept in ``--results`` as they come, so an interrupted run goes on where
it was.  ``equivalent_mutants.json`` lists, with reasons, mutants that compute the same thing.
"""

from __future__ import annotations

import argparse
import ast
import functools
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "rules"), str(Path(__file__).resolve().parent)]

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402

EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
PROJECT = ("fusewright", "harness", "spec_", "linear_cases", "test_")
OPTIONS = ["-x", "-q", "--assert=plain", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:timeout"]
OPTIONS += ["-W", "ignore", "-o", "addopts="]
ENGINE = ("engine.py", "rule.py", "__init__.py")


class Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from another source."""

    def __init__(self, mutant: Mutant) -> None:
        path = Path(mutant.file).resolve().relative_to(ROOT).with_suffix("")
        self.module, self.mutant = ".".join(path.parts), mutant

    def find_spec(self, name: str, path: object, target: object = None) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, origin=self.mutant.file) if name == self.module else None

    def exec_module(self, module: object) -> None:
        name, source = f"<mutant of {self.mutant.file}>", self.mutant.source
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)  # tests read the source
        exec(compile(source, name, "exec"), module.__dict__)


class Select:
    """Keeps the rule tests that concern a file, the quick ones first."""

    SLOW = ("test_cases", "test_every_phrase", "test_reads_like")

    def __init__(self, file: str) -> None:
        self.stem = Path(file).stem

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = sorted(filter(self._concerns, items), key=lambda i: i.name.startswith(self.SLOW))

    def _concerns(self, item: pytest.Item) -> bool:
        spec = getattr(item, "callspec", None)
        rule = spec.params["spec"].rule if spec and "spec" in spec.params else None
        if rule is None:
            return self.stem == "slots" or "ir" not in item.path.parts
        module = sys.modules[rule.replacement.__module__]
        return self.stem == module.__name__.split(".")[-1] or _uses(module.__name__, self.stem)


@functools.cache
def _uses(module: str, stem: str) -> bool:
    """Whether a module imports, perhaps through others, fusewright's module `stem`."""
    source = Path(sys.modules[module].__file__ or "").read_text()
    imported = [name for name in sys.modules if name.startswith("fusewright.") and f"from {name} import" in source]
    direct = any(name.split(".")[-1] == stem for name in imported)
    return direct or any(_uses(name, stem) for name in imported if ".rules." in name and name != module)


def test_paths(file: str) -> list[str]:
    """The tests that may notice a change in the file."""
    paths = ["tests/rules"]
    own = ROOT / "tests" / Path(file).resolve().relative_to(ROOT / "fusewright").parent / f"test_{Path(file).stem}.py"
    return [str(own)] * own.exists() + [str(ROOT / p) for p in paths]


def run_child(mutant: Mutant, seconds: int) -> int:
    """The child's process id; it exits with 0 when every test passes on the mutant."""
    child = os.fork()
    if child:
        return child
    signal.alarm(seconds)
    null = os.open(os.devnull, os.O_WRONLY)
    if not os.environ.get("MUTATE_SHOW"):
        os.dup2(null, 1)
        os.dup2(null, 2)
    for name in [n for n in sys.modules if n.startswith(PROJECT)]:
        del sys.modules[name]
    sys.meta_path.insert(0, Changed(mutant))
    code = 99
    try:
        code = pytest.main([*OPTIONS, *test_paths(mutant.file)], plugins=[Select(mutant.file)])
    finally:
        os._exit(int(code))


def status(code: int) -> str:
    """What a child's wait status says about its mutant."""
    if os.WIFSIGNALED(code):
        return "timeout" if os.WTERMSIG(code) == signal.SIGALRM else "killed"
    return "survived" if os.WEXITSTATUS(code) == 0 else "killed"


def run_all(chosen: Sequence[Mutant], jobs: int, seconds: int, results: Path) -> None:
    """Run the mutants that have no result yet, `jobs` at a time, and write each result as it comes."""
    done = known(results)
    waiting = [m for m in chosen if (m.file, m.name) not in done]
    running: dict[int, tuple[Mutant, float]] = {}
    with results.open("a") as sink:
        while waiting or running:
            while waiting and len(running) < jobs:
                mutant = waiting.pop(0)
                running[run_child(mutant, seconds)] = (mutant, time.monotonic())
            process, code = os.wait()
            mutant, start = running.pop(process)
            entry = {"file": mutant.file, "name": mutant.name, "line": mutant.line, "status": status(code)}
            sink.write(json.dumps({**entry, "seconds": round(time.monotonic() - start, 1)}) + "\n")
            sink.flush()
            if entry["status"] == "survived":
                print(f"survived: {mutant.file}:{mutant.line} {mutant.name}", flush=True)


def known(results: Path) -> dict[tuple[str, str], str]:
    """The status of every mutant run before."""
    lines = results.read_text().splitlines() if results.exists() else []
    return {(e["file"], e["name"]): e["status"] for e in map(json.loads, lines)}


def report(chosen: Sequence[Mutant], results: Path) -> dict[str, object]:
    """Counts and scores per file and overall; equivalent mutants are out of the score."""
    equivalent = {(e["file"], e["mutant"]) for e in json.loads(EQUIVALENT.read_text())}
    done = known(results)
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for m in chosen:
        key = (m.file, m.name)
        kind = "equivalent" if key in equivalent else done[key]
        if kind == "equivalent" and done[key] != "survived":
            print(f"listed as equivalent, but {done[key]}: {m.file} {m.name}")
        counts.setdefault(m.file, Counter())[kind] += 1
        if kind == "survived":
            survivors.append({"file": m.file, "line": m.line, "mutant": m.name})
    files = {file: {**c, "score": score(c)} for file, c in counts.items()}
    overall = sum(counts.values(), Counter())
    return {"overall": {**overall, "score": score(overall)}, "files": files, "survivors": survivors}


def score(counts: Counter[str]) -> float:
    """The share of mutants that a test noticed."""
    noticed = counts["killed"] + counts["timeout"]
    return round(noticed / max(1, noticed + counts["survived"]), 4)


def targets() -> list[str]:
    """The rules and the arithmetic below them."""
    rules = sorted((ROOT / "fusewright" / "rules").glob("*.py"))
    found = [p for p in rules if p.name not in ENGINE] + [ROOT / "fusewright" / "ir" / "slots.py"]
    return [str(p.relative_to(ROOT)) for p in found]


def choose(options: argparse.Namespace) -> list[Mutant]:
    """The sample that was asked for, in random order."""
    every = [m for file in options.file or targets() for m in mutants(Path(file))]
    random.Random(options.seed).shuffle(every)
    return every[: options.count or len(every)]


def main() -> int:
    """Run and report; 1 when the score is below the mark, 2 when the tests fail without a mutation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", action="append", help="a file to mutate (default: all rules and slots.py)")
    parser.add_argument("--count", type=int, help="a random sample of this size")
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument("--jobs", type=int, default=1, help="children at a time")
    parser.add_argument("--seconds", type=int, default=120, help="limit per mutant")
    parser.add_argument("--results", type=Path, default=ROOT / ".mutation.jsonl", help="where results are kept")
    parser.add_argument("--mark", type=float, default=0.95, help="the score to reach")
    parser.add_argument("--json", type=Path, help="write the report here")
    options = parser.parse_args()
    os.chdir(ROOT)
    torch.set_num_threads(1)
    quick = hypothesis.settings(
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate), report_multiple_bugs=False
    )
    hypothesis.settings.register_profile("mutation", quick)
    hypothesis.settings.load_profile("mutation")
    importlib.import_module("harness").specs()  # PyTorch and all else that the children share
    gc.freeze()  # or every child would go through all of it again
    chosen = choose(options)
    for file in sorted({m.file for m in chosen}):
        plain = Mutant(file, "", 0, ast.unparse(ast.parse(Path(file).read_text())))
        if status(os.waitpid(run_child(plain, 600), 0)[1]) != "survived":
            print(f"the tests that concern {file} fail without any mutation")
            return 2
    run_all(chosen, options.jobs, options.seconds, options.results)
    result = report(chosen, options.results)
    print(json.dumps(result, indent=2))
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    return int(result["overall"]["score"] < options.mark)


if __name__ == "__main__":
    sys.exit(main())
