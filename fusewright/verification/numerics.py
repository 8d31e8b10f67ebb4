"""Arithmetic of the references: float64 whatever a model hard-codes, and float64 on operands rounded to tf32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

TF32_EPS = 2.0**-10
"""The distance from 1 to the next larger number that tf32 has."""
_CONVOLUTIONS = frozenset({"convolution", "convolution_backward"})
_MATMULS = frozenset({"mm", "addmm", "bmm", "baddbmm"})
_WIDE = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}


class RoundedOperands(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Rounds the operands of convolutions and matmuls to tf32, where asked for, and changes nothing else.

    Operands of `dtype` that is: float32, or the dtype of a run that stands for one in float32.
    """

    dtype = torch.float32

    def __init__(self, *, convolutions: bool = False, matmuls: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rounded = (_CONVOLUTIONS if convolutions else frozenset()) | (_MATMULS if matmuls else frozenset())

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation."""
        if getattr(func, "overloadpacket", func).__name__ in self._rounded:
            args = tuple(round_to_tf32(x) if isinstance(x, Tensor) and x.dtype == self.dtype else x for x in args)
        return func(*args, **dict(kwargs or {}))


class WideArithmetic(RoundedOperands):  # type: ignore[no-untyped-call]
    """Runs a model that is already in float64, and keeps it there.

    Casts and new tensors that name a narrower dtype (a hard-coded ``.float()``) become float64.  The operands of
    convolutions and matmuls are rounded to tf32 first where that is asked for.  `bytes` counts all that was allocated.
    """

    dtype = torch.float64

    def __init__(self, *, convolutions: bool = False, matmuls: bool = False) -> None:
        super().__init__(convolutions=convolutions, matmuls=matmuls)
        self.bytes = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation wide."""
        kwargs = dict(kwargs or {})
        if kwargs.get("dtype") in _WIDE:
            kwargs["dtype"] = _WIDE[kwargs["dtype"]]
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for x in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(x, Tensor):
                self.gave(x, args)
        return result

    def gave(self, x: Tensor, args: tuple[Any, ...]) -> None:
        """Takes in what an operation on `args` gave."""
        self.bytes += x.numel() * x.element_size()


class RoundedResults(WideArithmetic):  # type: ignore[no-untyped-call]
    """Rounds what each operation of a float64 run gives to float32: float32 arithmetic with no error but that."""

    def gave(self, x: Tensor, args: tuple[Any, ...]) -> None:
        """Rounds it, in place, unless it shows what has been rounded."""
        super().gave(x, args)
        if x.dtype == self.dtype and not any(isinstance(a, Tensor) and _is_view(x, a) for a in args):
            x.copy_(x.to(torch.float32))


class OtherRoundings(WideArithmetic):  # type: ignore[no-untyped-call]
    """Rounds every product and every partial sum of a float64 run otherwise.

    Operations that are linear in an operand get it times `FACTOR`, and what they give is divided by that.  So a model
    that is float64 itself, whose truth is no more exact than eager, has another sample of eager's error.
    """

    FACTOR = 1.1
    # Where the operands are that are multiplied: a result is linear in all of them together.
    LINEAR: ClassVar[dict[str, tuple[int, ...]]] = {
        **dict.fromkeys(("mm", "bmm", "convolution_backward", "sum", "mean"), (0,)),
        **{"convolution": (0, 2), "addmm": (0, 1), "baddbmm": (0, 1)},
    }

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs one operation."""
        places = self.LINEAR.get(getattr(func, "overloadpacket", func).__name__, ())
        first = args[places[0]] if places else None
        if not isinstance(first, Tensor) or first.dtype != self.dtype:
            return super().__torch_dispatch__(func, types, args, kwargs)
        args = tuple(a * self.FACTOR if i in places and a is not None else a for i, a in enumerate(args))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if isinstance(result, Tensor):
            return result / self.FACTOR
        return tuple(r if r is None else r / self.FACTOR for r in result)


def _is_view(x: Tensor, of: Tensor) -> bool:
    return x is not of and x.untyped_storage().data_ptr() == of.untyped_storage().data_ptr()


def round_to_tf32(x: Tensor) -> Tensor:
    """`x` rounded to nearest on tf32's ten explicit mantissa bits, in `x`'s dtype."""
    bits = x.to(torch.float32).contiguous().view(torch.int32)
    rounded = ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded.to(x.dtype), x)


def tf32_allowed(precision: str) -> tuple[bool, bool]:
    """Whether convolutions and matmuls may use tf32 on CUDA, under `precision` and the user's own flags."""
    if precision != "eager":
        return precision == "tf32", precision == "tf32"
    backends: Any = torch.backends
    own = (backends.cudnn.conv.fp32_precision, backends.cuda.matmul.fp32_precision)
    convolutions, matmuls = ((backends.fp32_precision if value == "none" else value) == "tf32" for value in own)
    return convolutions, matmuls


@contextmanager
def ieee_float32() -> Iterator[None]:
    """Eager PyTorch without tf32, whatever the user's flags say."""
    backends: Any = torch.backends
    settings = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
    before = [setting.fp32_precision for setting in settings]
    try:
        for setting in settings:
            setting.fp32_precision = "ieee"
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setting.fp32_precision = value
