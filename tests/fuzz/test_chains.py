"""Random chains of modules: nothing wrong, nothing crashes, and every rule takes part."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from chains import Wrong, check, draw, run

import fusewright
from fusewright.rules import RULES, attention, gaps, parts, pointwise, slices, views

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
BLOCKS, SIZE = 20, 40
# Those in which every rule fires: `make test` leaves the others to `make test-all`.
FEW = (*range(8), 16, 18)
MANY_BLOCKS, MANY = 200, 100

# Chains whose rewritten program draws a dropout's mask in another order than eager, which verification finds out.
REFUSED = {
    1_014_050: "with one channel of stride 1, as a permuted max pool leaves it, conv1d answers channels-last",
}


# Rules for GPUs alone, where no chain is run, and about what no chain expands, cuts or splits, turns behind a product,
# takes the root of, or pools and reduces behind gaps.
EXPANDED = (views.function_of_expanded, views.function_of_expansion, views.reduction_of_expansion)
OTHERS = (views.function_of_permute, pointwise.square_of_root, gaps.extreme_of_windows_beside_gaps)
ELSEWHERE = {rule.name for rule in (*attention.RULES, *slices.RULES, *parts.RULES, *EXPANDED, *OTHERS)}


@pytest.mark.parametrize("block", FEW)
def test_chains(block: int, tmp_path_factory: pytest.TempPathFactory, record_property) -> None:
    _check(range(block * SIZE, (block + 1) * SIZE), len(FEW), "few", tmp_path_factory, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("block", sorted({*range(BLOCKS)} - {*FEW}))
def test_more_chains(block: int, tmp_path_factory: pytest.TempPathFactory, record_property) -> None:
    """Of which not every rule need be in one."""
    _check(range(block * SIZE, (block + 1) * SIZE), None, "more", tmp_path_factory, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(MANY_BLOCKS))
def test_many_chains(block: int, tmp_path_factory: pytest.TempPathFactory, record_property) -> None:
    first = 1_000_000 + block * MANY
    seeds = [seed for seed in range(first, first + MANY) if seed not in REFUSED]
    _check(seeds, MANY_BLOCKS, "many", tmp_path_factory, record_property)


@pytest.mark.slow
@pytest.mark.parametrize("seed", REFUSED)
def test_refused_chains(seed: int) -> None:
    """The program differs, and so the original is kept."""
    with pytest.raises(Wrong, match="float32 output 0 is off"):
        check(draw(seed), seed)
    drawn = draw(seed)
    kept = fusewright.optimize(drawn.model.float(), (drawn.x.float(),), rewrite="always", measure=False)
    assert "verification failed" in str(fusewright.explain(kept))


def _check(
    seeds: Sequence[int], blocks: int | None, name: str, factory: pytest.TempPathFactory, record_property
) -> None:
    """No chain of the block fails; of so many blocks, whichever ends last also looks at all of them together."""
    torch.set_num_threads(1)
    tally = run(seeds)
    record_property("chains", tally.summary())
    failures = "\n".join(f"seed {f['seed']}: {f['error']}\n{f['trace']}" for f in tally.failures)
    assert not tally.failures, f"{failures}\nreproduce with: python -m tests.fuzz.chains --seed SEED --count 1"
    shared = factory.getbasetemp().parent if "PYTEST_XDIST_WORKER" in os.environ else factory.getbasetemp()
    (shared / f"chains_{name}_{seeds[0]}.json").write_text(json.dumps(tally.fired))
    done = list(shared.glob(f"chains_{name}_*.json"))
    if len(done) == blocks:
        fired = sum((Counter(json.loads(path.read_text())) for path in done), Counter())
        idle = {rule.name for rule in RULES if not fired[rule.name]}
        assert idle - ELSEWHERE == set(), "rules that fired in no chain at all"
