"""The solutions under examples/solutions are what would be written now; `make solutions` writes them."""

from __future__ import annotations

import re

import pytest
from solutions import FOUNDING, ROOT, founding, text_of

# The header holds errors that were measured when the file was written.
HEADER = re.compile(r'\A""".*?"""', re.DOTALL)


@pytest.mark.parametrize("name", FOUNDING)
def test_examples_are_up_to_date(name: str) -> None:
    written = (ROOT / "examples" / "solutions" / f"{name}.py").read_text()
    now = text_of(founding(name))
    assert HEADER.sub("", written) == HEADER.sub("", now), "make solutions"


@pytest.mark.parametrize("name", FOUNDING)
def test_headers_say_what_was_done(name: str) -> None:
    (header,) = HEADER.findall((ROOT / "examples" / "solutions" / f"{name}.py").read_text())
    kernels = founding(name).program.kernels
    assert all(kernel.name in header for kernel in kernels)
    assert "Verified on" in header
    assert "Not measured: there was no GPU; the kernels compile for" in header
