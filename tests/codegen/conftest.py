"""Which cases of the tests with the most builds are left to ``make test-all``.

Every kernel that runs here, or is compiled for a GPU, is built for it: half a second to several seconds on a machine
with an empty cache.  Tests that do so for many cases run every fourth of them with each commit.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MANY = frozenset(
    [
        "test_as_the_model_in_float64",
        "test_right",
        "test_direct",
        "test_case",
        "test_every_family",
        "test_what_is_not_finite",
        "test_lanes_do_not_meet",
        "test_other_values_keep_a_shift",
        "test_compiles_without_spills",
        "test_kernels_compile_without_spills",
        "test_sanitizers_find_nothing",
        "test_what_the_emulator_would_find",
        "test_random_cases",
        "test_channels_and_rows_of_taps",
        "test_reductions",
        "test_features",
        "test_near_and_far",
        "test_orders_of_threads_agree",
        "test_against_float64",
        "test_warpgroups",
        "test_tensor_cores",
        "test_dtypes",
        "test_no_tile_takes_less_than_its_products",
        "test_value",
        "test_blocks_with_several_tiles",
        "test_orders_agree",
        "test_an_even_number_of_vectors_is_multiplied_as_it_was",
        "test_all_ways_of_sharing_rows_out",
        "test_equals_the_model",
        "test_rare",
        "test_random_groups",
        "test_clusters_finish_samples_in_one_launch",
        "test_planes_of_a_thread_share_their_input",
        "test_softmaxes_compile_without_spills",
        "test_twice_as_many_elements_on_their_way",
        "test_where_inputs_would_be_read_in_vain_taps_are_not_spread",
    ]
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks three of four cases of these tests, in the order of their files, as slow."""
    met: Counter[tuple[str, str]] = Counter()
    for item in items:
        name = getattr(item, "originalname", item.name)
        if name in MANY and item.path.is_relative_to(HERE):
            place = str(item.path), name
            met[place] += 1
            if met[place] % 4 != 1:
                item.add_marker(pytest.mark.slow)
