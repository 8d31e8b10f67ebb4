"""Reading and writing elements of tensors: half precisions are computed in float32."""

from __future__ import annotations

import torch

from fusewright.codegen.cpp import ELEMENT

HALVES = (torch.bfloat16, torch.float16)


def read(element: str, dtype: torch.dtype) -> str:
    """Text of an element in the compute type of its dtype."""
    return f"widened({element})" if dtype in HALVES else element


def written(value: str, dtype: torch.dtype) -> str:
    """Text of a value of the compute type of `dtype` as an element."""
    return f"to_{ELEMENT[dtype]}({value})" if dtype in HALVES else value
