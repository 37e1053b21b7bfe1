"""How long a step takes, learned from steps as they run.

A step's time is taken for a sum: so much for the step, so much for each of its tokens, and so on. The shares are what a Kalman
filter (R. E. Kalman, 1960) makes of the steps it is told of; one that took far longer or shorter than is likely, because the
host was busy with something else, counts as one at the border of what is likely (P. J. Huber, 1964).
"""

from collections.abc import Sequence
from math import sqrt

FIRST_NOISE = 0.3  # standard deviation of a step's time as a share of it, for the first step: it may be slower than others
NOISE = 0.05  # the same, before it is known
LEAST_NOISE = 0.01
NOISE_STEP = 1 / 16  # how quickly it is learned
TREND_STEP = 1 / 8  # how quickly it shows that steps take longer, or shorter, than they did
MOST_SHARE = 0.5  # by which a step can differ, as far as noise and trend are concerned
LEAST_MS = 1e-3  # of a step
DRIFT = 0.01  # how much a share may change in a step, of the step's time
OUTLIER = 3.0  # standard deviations; what is further away is moved there


class StepCost:
    """Milliseconds of a step as a weighted sum of its features, each of them >= 0, with weights >= 0 that are learned.

    num_steps  that it has learned from
    """

    def __init__(self, num_features: int):
        self.num_steps = 0
        self._weights = [0.0] * num_features
        self._spread = [[0.0] * num_features for _ in range(num_features)]  # covariance of the weights' errors
        self._noise = NOISE
        self._trend = 0.0

    def expected(self, features: Sequence[float]) -> float:
        """Return the milliseconds that features are likely to take."""
        return sum(weight * feature for weight, feature in zip(self._weights, features, strict=True))

    def bound(self, features: Sequence[float]) -> float:
        """Return milliseconds that they are unlikely to take more than: the less is known about such steps, the more it is."""
        expected = self.expected(features)
        return expected + sqrt(max(0.0, _dot(self._to_weights(features), features)) + (self._noise * expected) ** 2)

    def likely(self, features: Sequence[float]) -> float:
        """Return what the bound would be if the weights were certain."""
        return self.expected(features) * (1 + self._noise)

    def learn(self, features: Sequence[float], ms: float) -> None:
        """A step with these features took `ms` > 0."""
        if not self.num_steps:
            for i, feature in enumerate(features):
                self._spread[i][i] = (ms / max(feature, 1.0)) ** 2
        self.num_steps += 1
        expected, to_weights = self.expected(features), self._to_weights(features)
        noise = self._noise * max(expected, LEAST_MS) if self.num_steps > 1 else FIRST_NOISE * ms
        variance = max(0.0, _dot(to_weights, features)) + noise**2
        farthest = OUTLIER * sqrt(variance)
        error = max(-farthest, min(farthest, ms - expected))
        if self.num_steps > 1:
            share = max(-MOST_SHARE, min(MOST_SHARE, (ms - expected) / max(ms, expected)))
            self._noise = max(LEAST_NOISE, self._noise + (abs(share - self._trend) - self._noise) * NOISE_STEP)
            self._trend += (share - self._trend) * TREND_STEP
        for i, gain in enumerate(to_weights):
            self._weights[i] += gain / variance * error
            for j, other in enumerate(to_weights):
                self._spread[i][j] -= gain * other / variance
        self._keep_positive()
        self._forget(features, ms)

    def _to_weights(self, features: Sequence[float]) -> list[float]:
        """Return the covariance of the weights' errors with that of their sum."""
        return [_dot(line, features) for line in self._spread]

    def _keep_positive(self) -> None:
        """Move weights that are negative to 0, and the others with them, as they depend on one another by what was learned."""
        for i, line in enumerate(self._spread):
            excess = self._weights[i]
            if excess < 0 < line[i]:
                self._weights = [weight - excess * share / line[i] for weight, share in zip(self._weights, line, strict=True)]
        self._weights = [max(0.0, weight) for weight in self._weights]

    def _forget(self, features: Sequence[float], ms: float) -> None:
        """What was learned becomes less certain with each step, sooner where steps have a trend, up to what it was at first."""
        change = DRIFT + abs(self._trend) / 2
        for i, feature in enumerate(features):
            most = ms / max(feature, 1.0)
            if feature and self._spread[i][i] < most**2:
                self._spread[i][i] += (change * most) ** 2


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
