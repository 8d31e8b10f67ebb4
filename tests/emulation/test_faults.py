"""Every kind of wrong kernel that the emulator names."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from emulation import EmulationError, emulate
from emulation.emulate import ORDERS
from emulation.records import DYNAMIC, SAXPY, assert_right, kernel, ramp, saxpy


def test_dynamic_shared_overrun() -> None:
    body = DYNAMIC + "    reinterpret_cast<float*>(shared_memory)[threadIdx.x] = x[0]; y[threadIdx.x] = 0;"
    record = {size: kernel(body, "const float* x", "float* y", shape=("64",), shared=size) for size in (256, 252)}
    emulate(record[256], ramp(1))
    with pytest.raises(EmulationError, match="wrote outside the 252 bytes of dynamic shared memory"):
        emulate(record[252], ramp(1))
    emulate(record[256], ramp(1), sanitize=True)
    with pytest.raises(EmulationError, match="AddressSanitizer"):
        emulate(record[252], ramp(1), sanitize=True)


@pytest.mark.parametrize(("index", "order"), [("i + 1", "forward"), ("i - 1", "reverse"), ("i + 1", "shuffled")])
def test_read_out_of_bounds(index: str, order: str) -> None:
    wrong = saxpy(body=SAXPY.replace("z[i]", f"z[{index}]"))
    with pytest.raises(EmulationError, match="memory fault"):
        emulate(wrong, torch.ones(64), torch.ones(64), order=order)
    with pytest.raises(EmulationError, match=r"heap-buffer-overflow[^$]*f\.cu:4"):
        emulate(wrong, torch.ones(64), torch.ones(64), sanitize=True)


def test_read_that_ends_within_a_vector_of_the_end() -> None:
    """What is no multiple of 16 bytes does not reach the page behind it: the read gives poison."""
    late = saxpy(body=SAXPY.replace("z[i]", "z[i + 1]"))
    assert emulate(late, torch.ones(63), torch.ones(63)).isnan().tolist() == [False] * 62 + [True]


def test_write_out_of_bounds() -> None:
    late = saxpy(body=SAXPY.replace("y[i]", "y[i + 1]"))
    with pytest.raises(EmulationError, match="memory fault"):
        emulate(late, torch.ones(64), torch.ones(64))
    with pytest.raises(EmulationError, match="wrote outside y"):
        emulate(late, torch.ones(64), torch.ones(64), order="reverse")


def test_write_to_an_operand() -> None:
    record = kernel("    x[threadIdx.x] += 1; y[threadIdx.x] = 0;", "float* x", "float* y")
    with pytest.raises(EmulationError, match="wrote to its operand x"):
        emulate(record, ramp(64))


def test_misaligned_vector_is_found_by_the_sanitizer() -> None:
    body = "    y[threadIdx.x] = reinterpret_cast<const float2*>(x + 1)[threadIdx.x].x;"
    with pytest.raises(EmulationError, match="misaligned address"):
        emulate(kernel(body, "const float* x", "float* y", shape=("64",)), ramp(200), sanitize=True)


def test_wild_pointer_is_an_error_not_a_crash() -> None:
    body = "    y[threadIdx.x] = x[1ll << 40];"
    with pytest.raises(EmulationError, match=r"memory fault.*block \(0, 0, 0\), thread \(0, 0, 0\)"):
        emulate(kernel(body, "const float* x", "float* y"), ramp(64))
    assert_right(saxpy(), 3 * ramp(100), ramp(100), ramp(100))  # and the process goes on


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("if (threadIdx.x < 40) return;\n__syncthreads();", "deadlock in f, .*__syncthreads, line 4; 40 of 64"),
        ("if (threadIdx.x < 32) __syncthreads();", "deadlock"),
        (
            "if (threadIdx.x < 32)\n__syncthreads();\nelse\n__syncthreads();",
            "divergent __syncthreads: lines [46] and [46]",
        ),
        ("if (threadIdx.x < 9) __syncwarp(); else __shfl_sync(~0u, 1, 0);", "divergent warp"),
        ("if (threadIdx.x < 9) __syncthreads(); else __shfl_sync(~0u, 1, 0);", "deadlock"),
        ("if (threadIdx.x != 9) __shfl_sync(~0u, 1, 0);", "deadlock"),
        ("__shfl_sync(1u, 1, 0);", "lacks the calling lane"),
    ],
)
@pytest.mark.sampled
def test_threads_that_do_not_meet(body: str, message: str) -> None:
    record = kernel(body, "const float* x", "float* y", grid="3")
    for order in ORDERS:
        with pytest.raises(EmulationError, match=message):
            emulate(record, ramp(64), order=order)


def test_deadlock_under_the_sanitizers() -> None:
    record = kernel("    if (threadIdx.x < 32) __syncthreads();", "const float* x", "float* y", grid="3")
    with pytest.raises(EmulationError, match="deadlock in f, "):
        emulate(record, ramp(64), sanitize=True)


@pytest.mark.parametrize(
    ("attribute", "launched"),
    [("__launch_bounds__(32) ", "64 threads"), ("__cluster_dims__(2, 1, 1) ", "clusters of 1")],
)
def test_attributes_must_agree_with_the_launch(attribute: str, launched: str) -> None:
    record = kernel("    y[threadIdx.x] = 1;", "const float* x", "float* y")
    source = record.source.replace("__global__ ", f"__global__ {attribute}")
    with pytest.raises(EmulationError, match=launched):
        emulate(replace(record, source=source), ramp(64))


def test_ptx_elsewhere_is_refused() -> None:
    with pytest.raises(EmulationError, match="PTX outside"):
        emulate(kernel('    asm volatile("bar.sync 0;");', "const float* x", "float* y"), ramp(64))


def test_a_primitive_that_is_not_in_the_text_is_unknown() -> None:
    with pytest.raises(EmulationError, match="round_tf32"):
        emulate(kernel("    y[0] = round_tf32(x[0]);", "const float* x", "float* y"), ramp(64))


def test_parameters_must_be_of_the_kinds_launched() -> None:
    body, before = "    y[threadIdx.x] = m;", ""
    record = kernel(body, "const float* x", "float* y", "int n", before=before)
    wrong = replace(record, source=record.source.replace("int n", "long long m"))
    with pytest.raises(EmulationError, match="parameter 3 is of kind 'l', not 'i'"):
        emulate(wrong, ramp(64))
