"""Computes the polynomials of `fusewright/codegen/polynomials.py`: ``python tools/polynomials.py``.

Each is the Chebyshev interpolation of the part of a function that is left when its leading terms are taken out, in 40
digits, coefficients rounded to the type they are used in, lowest degree first; the error is that before rounding.
"""

from __future__ import annotations

import struct

from mpmath import atan, chebyfit, cos, erf, erfc, exp, ln, log1p, mp, mpf, ncdf, nstr, pi, sin, sqrt

mp.dps = 40
HALF_LN2 = ln(2) / 2 * mpf("1.0001")
ROOT_HALF, ROOT_TWO = mpf("0.70710"), mpf("1.41422")


def exponential(r):  # type: ignore[no-untyped-def]
    """(e^r - 1 - r) / r^2"""
    return (exp(r) - 1 - r) / r**2 if abs(r) > 1e-12 else mpf(1) / 2 + r / 6


def logarithm(f):  # type: ignore[no-untyped-def]
    """(ln(1 + f) - f + f^2/2) / f^3"""
    return (log1p(f) - f + f * f / 2) / f**3 if abs(f) > 1e-10 else mpf(1) / 3 - f / 4


def binary_logarithm(f):  # type: ignore[no-untyped-def]
    """log2(1 + f) / f"""
    return log1p(f) / ln(2) / f if abs(f) > 1e-12 else 1 / ln(2)


def power_of_two(r):  # type: ignore[no-untyped-def]
    """(2^r - 1) / r"""
    return (mpf(2) ** r - 1) / r if abs(r) > 1e-12 else ln(2)


def error(z):  # type: ignore[no-untyped-def]
    """erf(x) / x - 1, in z = x^2"""
    return erf(sqrt(z)) / sqrt(z) - 1 if z > 1e-30 else 2 / sqrt(mp.pi) - 1


def complement(t):  # type: ignore[no-untyped-def]
    """ln(1 - erf t)"""
    return mp.log(erfc(t))


def complement_in_bits(t):  # type: ignore[no-untyped-def]
    """log2(1 - erf t)"""
    return complement(t) / ln(2)


def below(t):  # type: ignore[no-untyped-def]
    """ln of the share of the normal distribution that lies below -t"""
    return ln(ncdf(-t))


def sine(z):  # type: ignore[no-untyped-def]
    """(sin r / r - 1) / z, in z = r^2"""
    return (sin(sqrt(z)) / sqrt(z) - 1) / z if z > 1e-15 else -mpf(1) / 6


def cosine(z):  # type: ignore[no-untyped-def]
    """(cos r - 1 + z/2) / z^2, in z = r^2"""
    return (cos(sqrt(z)) - 1 + z / 2) / z**2 if z > 1e-10 else mpf(1) / 24


def arc_tangent(z):  # type: ignore[no-untyped-def]
    """(atan t / t - 1) / z, in z = t^2"""
    return (atan(sqrt(z)) / sqrt(z) - 1) / z if z > 1e-15 else -mpf(1) / 3


def logarithm_of_sum(u):  # type: ignore[no-untyped-def]
    """ln(1 + u) / u"""
    return log1p(u) / u if u > 1e-15 else mpf(1)


def logarithm_of_rest(d):  # type: ignore[no-untyped-def]
    """(-ln(1 - d) - d) / d^2"""
    return (-log1p(-d) - d) / d**2 if d > 1e-15 else mpf(1) / 2


# name: function, interval, number of coefficients, digits
POLYNOMIALS = {
    "exp32": (exponential, (-HALF_LN2, HALF_LN2), 5, 9),
    "exp64": (exponential, (-HALF_LN2, HALF_LN2), 11, 17),
    "log32": (logarithm, (ROOT_HALF - 1, ROOT_TWO - 1), 9, 9),
    "log2_64": (binary_logarithm, (ROOT_HALF - 1, ROOT_TWO - 1), 12, 17),
    "exp2_64": (power_of_two, (mpf("-0.5001"), mpf("0.5001")), 6, 17),
    "erf32": (error, (0, mpf("0.92") ** 2), 7, 9),
    "erfc32": (complement, (mpf("0.92"), mpf("3.95")), 9, 9),
    "erfc_bits32": (complement_in_bits, (mpf("0.92"), mpf("3.95")), 9, 9),
    "gelu32": (below, (0, 6), 12, 9),
    "sin32": (sine, (0, (pi / 4) ** 2), 3, 9),
    "half_turn32": (sine, (0, (pi / 2 * mpf("1.0001")) ** 2), 4, 9),
    "cos32": (cosine, (0, (pi / 4) ** 2), 3, 9),
    "atan32": (arc_tangent, (0, 1), 9, 9),
    "log1p32": (logarithm_of_sum, (0, 1), 9, 9),
    "rest32": (logarithm_of_rest, (0, mpf("0.5")), 8, 9),
}


def coefficients(name: str) -> tuple[list[float], str]:
    """The coefficients, lowest degree first, and the greatest error of the polynomial."""
    function, interval, count, digits = POLYNOMIALS[name]
    found, worst = chebyfit(function, list(interval), count, error=True)
    kind = "f" if digits == 9 else "d"
    return [struct.unpack(kind, struct.pack(kind, float(c)))[0] for c in reversed(found)], nstr(worst, 2)


if __name__ == "__main__":
    for name in POLYNOMIALS:
        values, worst = coefficients(name)
        print(f'"{name}": ({", ".join(f"{v:.{POLYNOMIALS[name][3]}g}" for v in values)}),  # error {worst}')
