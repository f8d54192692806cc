"""log, log1p and the inverse error function as XLA computes them on a processor, so that what is drawn through them comes out alike.

In float32 each is a polynomial whose steps are fused multiply-adds, and the order of the steps decides the last bit: they are taken here in XLA's
order. That holds bit for bit on processors with fused multiply-add (x86 since 2013, ARM); other devices round elsewhere, by a unit or two in the last
place. In float64 the logarithm is torch's own and nothing is fused, which differs by as much. float16 and bfloat16 go through float32.
"""

import torch
from torch import Tensor

_FULL = (torch.float32, torch.float64)

# Moshier 1989, "Methods and Programs for Mathematical Functions" (Cephes): logf's polynomial and ln 2 in two parts, log1p's rational function.
_LOG = (
    (7.0376836292e-2, -1.1514610310e-1, 1.1676998740e-1),
    (-1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1),
    (2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1),
)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4
_SQRT_HALF, _LOG1P_SMALL = 0.707106781186547524, 0.41421356237309504880
_LOG1P_ABOVE = (
    *(4.5270000862445199635215e-5, 4.9854102823193375972212e-1, 6.5787325942061044846969, 2.9911919328553073277375e1),
    *(6.0949667980987787057556e1, 5.7112963590585538103336e1, 2.0039553499201281259648e1),
)
_LOG1P_BELOW = (
    *(1.0, 1.5062909083469192043167e1, 8.3047565967967209469434e1, 2.2176239823732856465394e2, 3.0909872225312059774938e2),
    *(2.1642788614495947685003e2, 6.0118660497603843919306e1),
)

# Giles 2012, "Approximating the erfinv function", in w = -ln(1 - x²): for each part its upper end, what is subtracted from w, or from √w beyond the
# first part, and the coefficients.
_ERF_INV_32 = (
    (
        5.0,
        2.5,
        (2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087, -0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
    ),
    (
        torch.inf,
        3.0,
        (-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773, -0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
    ),
)
_ERF_INV_64 = (
    (
        6.25,
        3.125,
        (
            *(-3.64441206401782e-21, -1.6850591381820166e-19, 1.28584807152564e-18, 1.1157877678025181e-17, -1.3331716628546209e-16),
            *(2.0972767875968562e-17, 6.6376381343583238e-15, -4.0545662729752069e-14, -8.1519341976054722e-14, 2.6335093153082323e-12),
            *(-1.2975133253453532e-11, -5.4154120542946279e-11, 1.0512122733215323e-09, -4.1126339803469837e-09, -2.9070369957882005e-08),
            *(4.2347877827932404e-07, -1.3654692000834679e-06, -1.3882523362786469e-05, 0.00018673420803405714, -0.000740702534166267),
            *(-0.0060336708714301491, 0.24015818242558962, 1.6536545626831027),
        ),
    ),
    (
        16.0,
        3.25,
        (
            *(2.2137376921775787e-09, 9.0756561938885391e-08, -2.7517406297064545e-07, 1.8239629214389228e-08, 1.5027403968909828e-06),
            *(-4.013867526981546e-06, 2.9234449089955446e-06, 1.2475304481671779e-05, -4.7318229009055734e-05, 6.8284851459573175e-05),
            *(2.4031110387097894e-05, -0.00035503752036284748, 0.0009532893797373805, -0.0016882755560235047, 0.0024914420961078508),
            *(-0.0037512085075692412, 0.0053709145535900636, 1.0052589676941592, 3.0838856104922208),
        ),
    ),
    (
        torch.inf,
        5.0,
        (
            *(-2.7109920616438573e-11, -2.5556418169965252e-10, 1.5076572693500548e-09, -3.789465440126737e-09, 7.61570120807834e-09),
            *(-1.496002662714924e-08, 2.9147953450901081e-08, -6.7711997758452339e-08, 2.2900482228026655e-07, -9.9298272942317e-07),
            *(4.5260625972231537e-06, -1.9681778105531671e-05, 7.5995277030017761e-05, -0.00021503011930044477, -0.00013871931833623122),
            *(1.0103004648645344, 4.8499064014085844),
        ),
    ),
)


def fused(a: Tensor, b: Tensor | float, c: Tensor | float) -> Tensor:
    """a · b + c rounded once to a's dtype: the product of two narrower numbers is exact in float64. In float64 itself rounded twice."""
    a64, b64, c64 = (torch.as_tensor(x, dtype=a.dtype).to(torch.float64) for x in (a, b, c))
    return (a64 * b64 + c64).to(a.dtype)


def log(x: Tensor) -> Tensor:
    """ln x (…), -inf at 0, NaN below."""
    if x.dtype != torch.float32:
        return torch.log(x) if x.dtype == torch.float64 else log(x.float()).to(x.dtype)
    word = torch.clamp(x, min=torch.finfo(torch.float32).tiny).view(torch.int32)
    m = ((word & 0x007FFFFF) | 0x3F000000).view(torch.float32)  # in [½, 1)
    small = m < _SQRT_HALF
    exponent = ((word >> 23) - 126 - small.to(torch.int32)).to(torch.float32)
    m = torch.where(small, m - 1 + m, m - 1)
    square = m * m
    cube = square * m
    high, middle, low = (fused(fused(m, c0, c1), m, c2) for c0, c1, c2 in _LOG)
    y = fused(fused(fused(high, cube, middle), cube, low), cube, exponent * _LN2_LOW)
    y = fused(exponent, _LN2_HIGH, (m - square * 0.5) + y)
    y = torch.where(x == 0, -torch.inf, torch.where(x == torch.inf, torch.inf, y))
    return torch.where(torch.isnan(x) | (x < 0), torch.nan, y)


def log1p(x: Tensor) -> Tensor:
    """ln(1 + x) (…), -inf at -1, NaN below."""
    if x.dtype not in _FULL:
        return log1p(x.float()).to(x.dtype)
    square = x * x
    ratio = _polynomial(_LOG1P_ABOVE, x) / _polynomial(_LOG1P_BELOW, x)
    small = x + fused(square, -0.5, (x * square) * ratio)
    return torch.where(torch.abs(x) < _LOG1P_SMALL, small, log(1 + x))


def erf_inv(x: Tensor) -> Tensor:
    """The y with erf(y) = x (…) in [-1, 1]; ±inf at the ends."""
    if x.dtype not in _FULL:
        return erf_inv(x.float()).to(x.dtype)
    w = -log1p(x * -x)
    root = torch.sqrt(w.to(torch.float64)).to(x.dtype)  # torch's own float32 root is not always the nearest number
    found = torch.full_like(x, torch.nan)
    for end, shift, coefficients in reversed(_ERF_INV_32 if x.dtype == torch.float32 else _ERF_INV_64):
        argument = (w if shift < 3 or end == 6.25 else root) - shift
        found = torch.where(w < end, _polynomial(coefficients, argument), found)
    return torch.where(torch.abs(x) == 1, x * torch.inf, found * x)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    """Horner's rule from the highest power."""
    value = torch.full_like(x, coefficients[0])
    for c in coefficients[1:]:
        value = fused(value, x, c)
    return value
