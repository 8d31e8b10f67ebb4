"""The solutions under examples/solutions are what would be written now; `make solutions` writes them."""

from __future__ import annotations

import re

import pytest
from solutions import FOUNDING, ROOT, draft, founding, text_of

from fusewright.runtime.device import DeviceFacts

# The header holds errors that were measured when the file was written.
HEADER = re.compile(r'\A""".*?"""', re.DOTALL)
ON_A_CPU = "conv_avgpool_sigmoid_sum"

# What two machines may measure of themselves.
RATES = {
    "small": DeviceFacts("small", conv=2e10, matmul=3e10, wide=1e10, memory=5e9, reduce=4e9, window=5e8, launch=3e-6),
    "large": DeviceFacts(
        "large", conv=2e12, matmul=3e12, wide=1e12, memory=2e11, reduce=2e11, window=4e10, launch=8e-7
    ),
}


def committed(name: str) -> str:
    """The text of a solution under examples."""
    return (ROOT / "examples" / "solutions" / f"{name}.py").read_text()


@pytest.mark.parametrize("name", FOUNDING)
def test_examples_are_up_to_date(name: str) -> None:
    now = text_of(founding(name))
    assert HEADER.sub("", committed(name)) == HEADER.sub("", now), "make solutions"


@pytest.mark.parametrize("rates", RATES)
def test_the_example_for_a_cpu_is_up_to_date_on_every_machine(rates: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusewright.pipeline.device_facts", lambda _: RATES[rates])
    made = draft(ROOT / "examples" / f"{ON_A_CPU}.py", target="cpu")
    (kernel,) = made.program.kernels
    assert kernel.target == "cpu"
    text = text_of(made)
    assert HEADER.sub("", committed(f"{ON_A_CPU}_cpu")) == HEADER.sub("", text), "make solutions"
    assert kernel.source in text


@pytest.mark.parametrize("name", FOUNDING)
def test_headers_say_what_was_done(name: str) -> None:
    (header,) = HEADER.findall(committed(name))
    kernels = founding(name).program.kernels
    assert all(kernel.name in header for kernel in kernels)
    assert "Verified on" in header
    assert "Not measured: there was no GPU; the kernels compile for" in header


def test_the_header_for_a_cpu_says_that_its_kernels_ran() -> None:
    (header,) = HEADER.findall(committed(f"{ON_A_CPU}_cpu"))
    assert "in one generated CPU kernel" in header
    assert "Verified on a CPU, against float64" in header
    assert "Not measured, as asked; built in" in header
