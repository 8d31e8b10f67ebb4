"""Functions of ordinary arguments: what a function need not care about in nearly every loop costs as much as itself.

Infinities, NaN, results below the normal numbers, the many bits of pi that a sine of a large number wants: none may be
a branch, so every argument would pay for them.  Here a loop goes once with functions that leave them out and notice if
one was met (`Ordinary`), and only then once more with those that know them all (`Any`).  One text serves both, which
`fusewright.codegen.cpu.loops` writes:

    template <typename Maths>                          Ordinary or Any
    bool values_with(...) {                            says whether the results are to be computed again
        int rare = 0;
    #pragma omp simd reduction(| : rare)
        for (...) { Maths maths; ... sin(maths, x) ...; rare |= maths.rare; }
        return rare;
    }
"""

from __future__ import annotations

import re
from string import Template

KINDS = """
// How functions are computed: for ordinary arguments, noticing those that are not, or for any.
struct Ordinary { int rare = 0; };
struct Any { static constexpr int rare = 0; };
"""

# name -> the text of its form for ordinary arguments; those of positive numbers are told from others by their bits.
_ORDINARY = {
    "exp": """
    maths.rare |= !(fabs(x) < 87.0f);
    return exp_normal(x);
""",
    "expm1": """
    maths.rare |= !(fabs(x) < 87.0f);
    return expm1_normal(x);
""",
    "exp2": """
    maths.rare |= !(fabs(x) < 126.0f);
    return exp2_normal(x);
""",
    "log": """
    maths.rare |= !is_normal(x);
    return log_of_normal(x, 0);
""",
    "log2": """
    maths.rare |= !is_normal(x);
    return log2_of_normal(x, 0);
""",
    "log10": """
    maths.rare |= !is_normal(x);
    return log10_of_normal(x, 0);
""",
    "log1p": """
    const float u = 1 + x;
    maths.rare |= !is_normal(u);
    return log_of_normal(u, 0) + (x - (u - 1)) / u;
""",
    "mish": """
    maths.rare |= !(fabs(x) < 40.0f);
    const float e = exp_normal(x), n = e * (e + 2);
    return x * (n / (n + 2));
""",
    "sin": """
    maths.rare |= !(fabs(x) < NEAR);
    return sine_of_near(x, 0);
""",
    "cos": """
    maths.rare |= !(fabs(x) < NEAR);
    return sine_of_near(x, 1);
""",
}
_FORMS = """
inline float $name(Any, float x) { return $name(x); }
inline float $name(Ordinary& maths, float x) {$body}
"""
# The sign of a negative number's power is known where the exponent is.
_POW = """
inline float pow(Any, float x, float y) { return pow(x, y); }
inline float pow(Ordinary& maths, float x, float y) {
    const int n = fabs(y) < 1e6f ? int(y) : 0;
    const double t = y * log2_in_double(fabs(x));
    maths.rare |= !is_normal(y == n ? fabs(x) : x) | !(fabs(t) < 126);
    return n & 1 && y == n ? copysign(exp2_of_double(t), x) : exp2_of_double(t);
}
"""
ORDINARY = {name: Template(_FORMS).substitute(name=name, body=body) for name, body in _ORDINARY.items()}
ORDINARY["pow"] = _POW

_CALL = re.compile(rf"\b({'|'.join(ORDINARY)})\(")


def with_maths(text: str) -> str:
    """A float expression whose functions are those of `Maths`."""
    return _CALL.sub(r"\1(maths, ", text)
