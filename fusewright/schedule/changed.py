"""Copies of records with other values, made by the ten thousand while tiles are looked for."""

from __future__ import annotations

from typing import Any, TypeVar

T = TypeVar("T")


def changed(record: T, **fields: Any) -> T:
    """`dataclasses.replace`, faster, for records that neither check nor keep anything when they are made."""
    made: T = object.__new__(type(record))
    vars(made).update(vars(record), **fields)
    return made
