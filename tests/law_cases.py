"""Laws with their factors, and what their parameters may be: for all tests of laws."""

import math

import numpy as np

from isentropic import laws
from isentropic.laws._formulas import InfoScale, StepLog

NS = np.array([0, 1, 2, 15, 16, 17, 511, 512, 513, 4096, 8191, 8192, 20000, 100000])
LN = np.log(np.maximum(NS, 1))

KNOTS, KNOT_FACTORS = np.array([16, 512, 8192]), np.array([0.5, 1.5, 1.25])


def through_knots(n, factors=KNOT_FACTORS):
    """The lines through the knots, and on beyond the outermost."""
    t, ts = np.log(np.maximum(n, 1)), np.log(KNOTS)
    first, last = np.diff(factors)[[0, -1]] / np.diff(ts)[[0, -1]]
    beyond = first * np.minimum(t - ts[0], 0) + last * np.maximum(t - ts[-1], 0)
    return np.interp(t, ts, factors) + beyond


FORMULAS = [
    (laws.Constant(2.5), np.full(NS.shape, 2.5)),
    (laws.LogLength(), LN / math.log(512)),
    (laws.LogLength(64, minimum=1), np.maximum(LN / math.log(64), 1)),
    (laws.SqrtLogLength(100), np.sqrt(LN / math.log(100))),
    (laws.SqrtLogLength(100, minimum=0.5), np.maximum(np.sqrt(LN / math.log(100)), 0.5)),
    (laws.AffineLog(0.4, -0.1), 0.4 * LN - 0.1),
    (laws.AffineLog(0.4, -0.1, minimum=0), np.maximum(0.4 * LN - 0.1, 0)),
    (laws.PowerLog(0.5, 0.2, 1.7), 0.5 + 0.2 * np.log(np.maximum(NS, 2)) ** 1.7),
    (laws.PowerLog(0.5, 0.2, -0.7), 0.5 + 0.2 * np.log(np.maximum(NS, 2)) ** -0.7),
    (StepLog(0.1, 8192), 1 + 0.1 * np.log1p(NS // 8192)),
    (laws.Power(0.1, 2048), (np.maximum(NS, 1) / 2048) ** 0.1),
    (laws.Power(0.5, minimum=1), np.maximum(np.sqrt(NS / 512), 1)),
    (
        InfoScale(512, 64),
        np.sqrt((1 - np.maximum(NS, 1.0) ** (-1 / 32)) / (1 - 512 ** (-1 / 32))),
    ),
    (laws.scaled(laws.LogLength(), 0.5), LN / math.log(512) / 2),
    (laws.shifted(laws.LogLength(), 1), np.log(NS + 1) / math.log(512)),
    (laws.Knots(KNOTS, KNOT_FACTORS.tolist()), through_knots(NS)),
    (laws.Knots((16, 512, 8192), (0.5, 1.5, 1.25), minimum=1), np.maximum(through_knots(NS), 1)),
    (laws.Knots((2, 9000), (0, 2)), 2 * (LN - math.log(2)) / math.log(4500)),
]


# What each law asks of the numbers in an array: a maker, the name, numbers that it takes, others.
# The first maker of a law is also the call of it in `cases`.
RANGES = [
    (laws.LogLength, "base", [1.5, 512.0], [1.0, 0.5, -3.0]),
    (laws.SqrtLogLength, "base", [1.5, 512.0], [1.0, 0.5]),
    (lambda x: InfoScale(x, 64), "base", [1.5, 512.0], [1.0, 0.0]),
    (lambda x: StepLog(x, 4), "coefficient", [-0.1, 0.0], []),
    (lambda x: StepLog(0.1, x), "period", [0.3, 8192.0], [0.0, -1.0]),
    (lambda x: laws.Power(0.1, x), "base", [0.5, 2048.0], [0.0, -1.0]),
    (lambda x: laws.Power(x), "exponent", [-0.5, 0.1], []),
    (lambda x: laws.Power(0.5, minimum=x), "minimum", [-0.5, 0.5], []),
    (lambda x: laws.PowerLog(x, 1.0, 1.0), "offset", [-1.0, 0.0], []),
    (lambda x: laws.PowerLog(1.0, x, 1.0), "coefficient", [-1.0, 0.0], []),
    (lambda x: laws.PowerLog(1.0, 1.0, x), "exponent", [-0.5, 2.0], []),
    (laws.AffineLog, "slope", [-0.5, 0.5], []),
    (lambda x: laws.AffineLog(0.5, x), "intercept", [-0.5, 0.5], []),
    (lambda x: laws.AffineLog(0.5, minimum=x), "minimum", [-0.5, 0.5], []),
    (lambda x: laws.LogLength(16, minimum=x), "minimum", [-0.5, 0.5], []),
    (lambda x: laws.SqrtLogLength(16, minimum=x), "minimum", [-0.5, 0.5], []),
    (laws.Constant, "value", [-2.0, 0.0], []),
    (lambda x: laws.scaled(laws.LogLength(), x), "factor", [-2.0, 0.0], []),
]


def gradients_of(backend, call, *arguments):
    """The gradients of the sum of what is called."""
    arguments = [backend.array(x) for x in arguments]
    if backend.library == "jax":
        import jax

        gradients = jax.grad(lambda *a: call(*a).sum(), tuple(range(len(arguments))))(*arguments)
    else:
        leaves = [x.requires_grad_() for x in arguments]
        out = call(*leaves).sum() + 0 * sum(x.sum() for x in leaves)  # a law may be constant
        gradients = backend.xp.autograd.grad(out, leaves)
    return [backend.numpy(g) for g in gradients]
