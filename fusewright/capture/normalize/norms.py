"""Normalisations and dropout."""

from __future__ import annotations

from typing import Literal

from fusewright.capture.normalize.call import Call, Handler, Normal
from fusewright.ir.ops import Dropout, Norm


def _with_statistics(call: Call, kind: Literal["batch", "instance"], flag: str) -> Normal:
    """Input statistics are used, and written to the running ones where there are any, exactly when `flag` says so."""
    mean, var = call.optional("running_mean"), call.optional("running_var")
    training = bool(call[flag])
    if (mean is None) != (var is None) or (mean is None and not training):
        return None
    serial = call.serial() if training and mean is not None else None
    op = Norm(kind, call["eps"], training=training, momentum=call["momentum"], serial=serial)
    return call.make(op, call.node("input"), call.optional("weight"), call.optional("bias"), mean, var)


def _batch(call: Call) -> Normal:
    return _with_statistics(call, "batch", "training")


def _instance(call: Call) -> Normal:
    return _with_statistics(call, "instance", "use_input_stats")


def _group(call: Call) -> Normal:
    op = Norm("group", call["eps"], groups=call["num_groups"])
    return call.make(op, call.node("input"), call.optional("weight"), call.optional("bias"), None, None)


def _layer(call: Call) -> Normal:
    op = Norm("layer", call["eps"], trailing=len(call["normalized_shape"]))
    return call.make(op, call.node("input"), call.optional("weight"), call.optional("bias"), None, None)


def _rms(call: Call) -> Normal:
    op = Norm("rms", call["eps"], trailing=len(call["normalized_shape"]))
    return call.make(op, call.node("input"), call.optional("weight"), None, None, None)


def _dropout(call: Call) -> Normal:
    x, p = call.node("input" if "input" in call.values else "self"), call["p"]
    if not call["train"] or p == 0:
        return x
    return call.make(Dropout(float(p), call.serial()), x)


TABLE: dict[str, Handler] = {
    "aten.batch_norm.default": _batch,
    "aten.instance_norm.default": _instance,
    "aten.group_norm.default": _group,
    "aten.layer_norm.default": _layer,
    "aten.rms_norm.default": _rms,
    "aten.dropout.default": _dropout,
}
