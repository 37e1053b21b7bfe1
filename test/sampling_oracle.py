"""The sampling rules once more, slowly and literally, in numpy float64. It shares no code with `sampling/`.

Written from the formulas of the behaviour contract: sort everything, look at every value, keep whole vectors.
"""

import math

import numpy as np


def softmax(z: np.ndarray, temperature: float) -> np.ndarray:
    """Return [V] probabilities of logits z [V]; -inf gives 0."""
    x = z.astype(np.float64) / temperature
    e = np.exp(x - x.max())
    return e / e.sum()


def joint_weights(q: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float]:
    """Return the weights [V] of rule "joint", and theta."""
    num_columns = len(q)
    k = num_columns if top_k <= 0 or top_k > num_columns else top_k
    p = 1.0 if top_p < 0 or top_p > 1 else top_p
    if p == 0:
        k, p = 1, 1.0
    theta = 0.0
    count, mass = 0, 0.0
    for value in np.unique(q)[::-1]:  # from the largest down, equal ones at once
        equal = int((q == value).sum())
        count += equal
        mass += value * equal
        if count >= k or mass >= p:
            theta = float(value)
            break
    above, equal = q > theta, q == theta
    if theta == 0:
        return np.where(above, q, 0.0), theta
    m = equal.sum()
    share = min((p - q[above].sum()) / (theta * m), (k - above.sum()) / m)
    return np.where(above, q, 0.0) + np.where(equal, q * min(max(share, 0.0), 1.0), 0.0), theta


def sequential_weights(q: np.ndarray, top_k: int, top_p: float) -> tuple[np.ndarray, float, float]:
    """Return the weights [V] of rule "sequential", the k-th best probability, and the last kept one."""
    num_columns = len(q)
    k = num_columns if top_k <= 0 or top_k > num_columns else top_k
    kth = float(np.sort(q)[::-1][k - 1])
    best = np.where(q >= kth, q, 0.0)
    best = best / best.sum()
    theta = 0.0
    if 0 < top_p < 1:
        mass = 0.0
        for value in np.sort(best)[::-1]:
            mass += value
            if mass >= top_p:
                theta = float(value)
                break
    kept = (best > 0) & (best >= theta)
    return np.where(kept, best, 0.0), kth, float(q[kept].min())


def above_min_p(z: np.ndarray, temperature: float, min_p: float) -> np.ndarray:
    """Return logits z [V] with -inf where the probability is below min_p times the largest one."""
    q = softmax(z, temperature)
    return np.where(q >= min_p * q.max(), z.astype(np.float64), -np.inf)


def repetition_penalized(z: np.ndarray, seen: set[int], penalty: float) -> np.ndarray:
    """Return logits z [V] after CTRL's penalty on the columns in `seen`."""
    after = z.astype(np.float64)
    for column in seen:
        after[column] = after[column] / penalty if after[column] > 0 else after[column] * penalty
    return after


def gumbel_probabilities(z: np.ndarray, temperature: float) -> np.ndarray:
    """Return the distribution [V] that Gumbel noise without a cap gives."""
    return softmax(z, temperature)


def noise_probabilities(z: np.ndarray, temperature: float, noise: float, num_points: int = 200_001) -> np.ndarray:
    """Return the distribution [V] of argmax(z / temperature + U(0, noise)), by numerical integration over the winning value."""
    x = z.astype(np.float64) / temperature
    t = np.linspace(x.max(), x.max() + noise, num_points)  # nothing below the best value can win
    below = np.clip((t[None, :] - x[:, None]) / noise, 0.0, 1.0)  # [V, T], P(x_i + noise <= t)
    density = ((t[None, :] >= x[:, None]) & (t[None, :] <= x[:, None] + noise)) / noise
    win = np.empty(len(x))
    for i in range(len(x)):
        win[i] = np.trapezoid(density[i] * np.prod(np.delete(below, i, axis=0), axis=0), t)
    return win / win.sum()


def next_penalties(
    penalties: np.ndarray, drawn: int, alpha_presence: float, alpha_frequency: float, alpha_decay: float
) -> np.ndarray:
    """Return the penalties [V] of the next step. Where alpha_presence is 0 a first hit adds alpha_frequency."""
    first = alpha_presence if alpha_presence != 0 else alpha_frequency
    after = penalties * alpha_decay
    after[drawn] += first if penalties[drawn] == 0 else alpha_frequency
    return after


def log_softmax(z: np.ndarray) -> np.ndarray:
    """Return [V] log-probabilities of logits z [V]."""
    z = z.astype(np.float64)
    top = z.max()
    return z - top - math.log(np.exp(z - top).sum())


MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
INCREMENTS = (0x9E3779B9, 0xBB67AE85)


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Return the four words of Philox4x32-10, in Python integers."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = MULTIPLIERS[0] * x0, MULTIPLIERS[1] * x2
        x0, x1, x2, x3 = (p1 >> 32) ^ x1 ^ k0, p1 % 2**32, (p0 >> 32) ^ x3 ^ k1, p0 % 2**32
        k0, k1 = (k0 + INCREMENTS[0]) % 2**32, (k1 + INCREMENTS[1]) % 2**32
    return x0, x1, x2, x3


def number(seed: int, step: int, choice: int, token: int | None = None, num_rejected: int = 0, word: int = 0) -> float:
    """Return u: word 0 or 1 of the draw after `num_rejected` others when `token` is None, else of the token's noise."""
    seed %= 2**64
    purpose, block, word = (0, num_rejected, word) if token is None else (1, token // 4, token % 4)
    bits = philox((step % 2**32, purpose, choice % 2**32, block), (seed % 2**32, seed >> 32))[word]
    return (2 * (bits >> 9) + 1) / 2**24


def draw_by_rejection(q: np.ndarray, top_p: float, seed: int, step: int, choice: int) -> tuple[int, float]:
    """Return the first drawn column that top_p keeps, and how close a draw came to being decided otherwise."""
    sums, margin = q.cumsum(), math.inf
    for num_rejected in range(10_000):
        u, v = (number(seed, step, choice, None, num_rejected, word) for word in (0, 1))
        target = u * sums[-1]
        column = int(np.flatnonzero((sums > target) & (q > 0))[0])
        place = q[q > q[column]].sum() + v * q[q == q[column]].sum()
        margin = min(margin, sums[column] - target, target - (sums[column] - q[column]), abs(place - top_p))
        if place < top_p:
            return column, margin
    raise AssertionError("nothing is kept")
