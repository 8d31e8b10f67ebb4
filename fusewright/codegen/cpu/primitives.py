"""Small functions that generated C++ uses: element types of tensors, and functions of the pointwise table as vectors.

Each is free of branches and calls, so that loops over them become vector instructions.  A kernel's text starts with
those it uses, so it depends on nothing.
"""

from __future__ import annotations

import re
from functools import cache

from fusewright.codegen.cpu.maths import MATHS
from fusewright.codegen.cpu.ordinary import KINDS, ORDINARY

# name -> text, in an order in which each uses only what stands before it.
PRIMITIVES: dict[str, str] = {
    "index": """
using index_t = long long;
""",
    "bits": """
// The same bits as another type.
template <typename To, typename From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}
""",
    "half": """
// Elements of tensors in half precisions are bits until they are read: bf16 and fp16 <-> float32.
struct bf16 { unsigned short bits; };
struct fp16 { unsigned short bits; };
""",
    "read_plain": """
inline float widened(float x) { return x; }
inline double widened(double x) { return x; }
""",
    "read_bf16": """
inline float widened(bf16 x) { return bits_as<float>(unsigned(x.bits) << 16); }
""",
    "read_fp16": """
inline float widened(fp16 x) {
    const unsigned magnitude = (x.bits & 0x7fffu) << 13, sign = (x.bits & 0x8000u) << 16;
    const float scaled = bits_as<float>(magnitude) * 0x1p112f;  // exact, of subnormal numbers as well
    const unsigned nonfinite = magnitude >= 0x0f800000u ? 0x7f800000u : 0u;
    return bits_as<float>(bits_as<unsigned>(scaled) | nonfinite | sign);
}
""",
    "write_bf16": """
// To nearest, half to even.
inline bf16 to_bf16(float x) {
    const unsigned b = bits_as<unsigned>(x), rounded = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    return {static_cast<unsigned short>(x != x ? 0x7fc0u : rounded)};
}
""",
    "write_fp16": """
// To nearest, half to even.
inline fp16 to_fp16(float x) {
    const unsigned b = bits_as<unsigned>(x), sign = b >> 16 & 0x8000u, magnitude = b & 0x7fffffffu;
    // Numbers below 2^-14 are rounded by adding a half, whose last bit weighs what theirs does.
    const unsigned small = bits_as<unsigned>(bits_as<float>(magnitude) + 0.5f) - 0x3f000000u;
    const unsigned normal = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    const unsigned finite = magnitude < 0x38800000u ? small : normal;
    const unsigned large = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    return {static_cast<unsigned short>(sign | (magnitude >= 0x477ff000u ? large : finite))};
}
""",
    **MATHS,
}


def used_primitives(text: str) -> str:
    """The primitives that a kernel's text calls, and what those call, in the order of the table; last, functions of
    ordinary arguments."""
    found: list[str] = []
    text = re.sub(r"//.*", "", text)
    ordinary = [form for name, form in ORDINARY.items() if re.search(rf"\b{name}\(maths, ", text)]
    ordinary = [KINDS, *ordinary] if ordinary else []
    text = "\n".join((text, *ordinary))
    own = set(re.findall(r"\w+", text))
    calls = set(own)
    for name, body in reversed(PRIMITIVES.items()):
        defined, called = _words(name, body)
        if defined & (own if name == "read_plain" else calls):
            found.insert(0, name)
            calls |= called
    return "".join((*(PRIMITIVES[name] for name in found), *ordinary)).lstrip("\n") + ("\n" if found else "")


@cache
def _words(name: str, body: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that call for a primitive (what its text defines, or the element type that its function reads), and all
    words in its text."""
    if name in ("read_bf16", "read_fp16"):
        defined = [name.removeprefix("read_")]
    else:
        defined = re.findall(r"^(?:struct |using (?:std::)?|inline \w+ )(\w+)", body, re.MULTILINE)
    return frozenset(defined), frozenset(re.findall(r"\w+", body))
