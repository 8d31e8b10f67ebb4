"""Polynomials of which generated code makes functions, near-minimax: `tools/polynomials.py` computes them."""

from __future__ import annotations

from string import Template
from textwrap import wrap

# name: variable, and coefficients from the lowest degree on
POLYNOMIALS: dict[str, tuple[str, tuple[float, ...]]] = {
    # (e^r - 1 - r) / r^2
    "exp32": ("r", (0.5, 0.166665763, 0.0416665561, 0.00836317893, 0.0013926184)),
    "exp64": (
        "r",
        (
            *(0.5, 0.16666666666666671, 0.041666666666666671, 0.0083333333333261358, 0.0013888888888883748),
            *(0.00019841269874820627, 2.4801587325547743e-05, 2.7557255400206422e-06, 2.7557273643110297e-07),
            *(2.5105217004720745e-08, 2.0914686968086876e-09),
        ),
    ),
    # (ln(1 + f) - f + f^2/2) / f^3
    "log32": (
        "f",
        (
            *(0.333333313, -0.24999997, 0.200007156, -0.166678026, 0.142490536, -0.12425676, 0.116854429),
            *(-0.114798367, 0.0697168112),
        ),
    ),
    # log2(1 + f) / f and (2^r - 1) / r, for powers
    "log2_64": (
        "f",
        (
            *(1.4426950409582409, -0.72134752489562859, 0.48089831107882708, -0.36067284516802289),
            *(0.2885414555706643, -0.24050280631061627, 0.20607166036528496, -0.17905110349635642),
            *(0.15931274101713258, -0.15722711745654189, 0.15345475317237653, -0.08433634978274461),
        ),
    ),
    "exp2_64": (
        "r",
        (
            *(0.69314718803520026, 0.24022650760645808, 0.05550357071152507, 0.0096180825199904674),
            *(0.0013390886332106697, 0.00015453182829959741),
        ),
    ),
    # erf(x) / x - 1, in x^2
    "erf32": (
        "z",
        (0.128379166, -0.376126349, 0.112837009, -0.0268596914, 0.00520171458, -0.000815005042, 8.39977802e-05),
    ),
    # ln(1 - erf t)
    "erfc32": (
        "t",
        (
            *(0.000325905363, -1.13026178, -0.631769538, -0.110140562, 0.0264594145, -0.00477437768),
            *(0.000600225001, -4.64933619e-05, 1.66059635e-06),
        ),
    ),
    # log2(1 - erf t)
    "erfc_bits32": (
        "t",
        (
            *(0.000470182044, -1.6306231, -0.911450744, -0.158899233, 0.0381728671, -0.00688797049),
            *(0.000865941634, -6.70757436e-05, 2.3957341e-06),
        ),
    ),
    # ln of the share of the normal distribution that lies below -t
    "gelu32": (
        "t",
        (
            *(-0.693147123, -0.797886729, -0.318293244, -0.0363848135, 0.00485371239, -1.78922601e-05),
            *(-0.000193847867, 5.65883784e-05, -9.2120008e-06, 9.26386235e-07, -5.37713518e-08, 1.38168144e-09),
        ),
    ),
    # (sin r / r - 1) / r^2, in r^2
    "sin32": ("z", (-0.166666642, 0.00833274797, -0.000195878907)),
    # the same of r up to pi/2
    "half_turn32": ("z", (-0.166666657, 0.0083332425, -0.000198227324, 2.63473271e-06)),
    # (cos r - 1 + r^2/2) / r^4, in r^2
    "cos32": ("z", (0.0416666642, -0.00138883025, 2.45479423e-05)),
    # (atan t / t - 1) / t^2, in t^2
    "atan32": (
        "z",
        (
            *(-0.333333313, 0.199997395, -0.142785683, 0.110337645, -0.0865688026, 0.0625016913, -0.0358715393),
            *(0.0135077713, -0.00238699722),
        ),
    ),
    # (2 artanh(w / 2) / w - 1) / w^2, in w^2
    "log1p32": ("z", (0.0833332986, 0.012502363, 0.00220598583, 0.000524443341)),
}


def with_polynomials(text: str) -> str:
    """`text` with polynomials in the place of their names, ``$name``."""
    return Template(text).substitute(_TEXTS)


def _horner(name: str) -> str:
    """The text of a polynomial, in lines that fit a function's body."""
    variable, coefficients = POLYNOMIALS[name]
    single = name.endswith("32")
    texts = [f"{c:.9g}f" if single else f"{c:.17g}" for c in coefficients]
    text = texts[-1]
    for i, term in enumerate(reversed(texts[:-1])):
        text = f"{term} + {variable} * {text if i == 0 else f'({text})'}"
    return "\n".join(wrap(text, 100, subsequent_indent="        ", break_long_words=False))


_TEXTS = {name: _horner(name) for name in POLYNOMIALS}
