"""Work that forked processes share."""

from __future__ import annotations

import multiprocessing
import os
import time

import pytest

from fusewright import side_by_side as module
from fusewright.side_by_side import side_by_side

HERE = os.getpid()
pytestmark = pytest.mark.skipif(
    module.cores() < 2 or "fork" not in multiprocessing.get_all_start_methods(), reason="no second core, or no fork"
)


def test_answers_are_in_the_order_of_the_items() -> None:
    factor = object()  # work may refer to what cannot be pickled
    items = [object() for _ in range(40)]
    found = side_by_side(lambda item: (items.index(item), factor is not None, os.getpid()), items, 60.0)
    assert found is not None and [index for index, *_ in found] == list(range(40))
    assert HERE not in {process for *_, process in found}


def test_what_takes_too_long_is_given_up() -> None:
    begun = time.monotonic()
    assert side_by_side(time.sleep, [60.0, 60.0], 0.5) is None
    assert time.monotonic() - begun < 20


def test_a_process_that_dies_costs_the_answer_at_once() -> None:
    begun = time.monotonic()
    assert side_by_side(lambda item: os._exit(1) if item else item, [0, 1], 60.0) is None
    assert time.monotonic() - begun < 20


def test_work_that_fails_is_left_to_who_asked() -> None:
    assert side_by_side(lambda item: 1 // item, [1, 0], 60.0) is None


def test_an_answer_that_cannot_be_sent_is_none() -> None:
    assert side_by_side(lambda item: lambda: item, [1, 0], 60.0) is None


@pytest.mark.parametrize(
    ("items", "cores", "methods"), [([1], 4, ["fork"]), ([1, 2], 1, ["fork"]), ([1, 2], 4, ["spawn"])]
)
def test_not_where_there_is_nothing_to_share(
    items: list[int], cores: int, methods: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cores", lambda: cores)
    monkeypatch.setattr(multiprocessing, "get_all_start_methods", lambda: methods)
    assert side_by_side(abs, items, 60.0) is None


def test_a_daemon_has_no_children() -> None:
    found = side_by_side(lambda _: side_by_side(abs, [1, 2], 60.0), [0, 0], 60.0)
    assert found == [None, None]
