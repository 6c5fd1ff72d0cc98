"""Thresholds on anomaly scores, from the scores of the training rows alone."""

import math

import torch
from torch import Tensor

MAD_DEVIATIONS = 5.0
POT_TAIL = 0.02  # the share of the largest scores that the tail is fitted to
RULES = ("quantile", "mad", "pot")


def threshold_of(scores: Tensor, rule: str | float, contamination: float) -> float:
    """Give the score above which a row counts as abnormal.

    Args:
        scores: (T,) of training rows; NaN is left out.
        rule: a number, which is the threshold itself; "quantile": the share `contamination` of the training
            rows lies above; "mad": so many robust standard deviations above the median; "pot": peaks over
            threshold, a generalised Pareto distribution of the largest scores, exceeded with a probability of
            `contamination` / 10 (Siffer et al., KDD 2017; fitted by probability-weighted moments).

    Raises:
        ValueError: another rule.
    """
    if isinstance(rule, (int, float)) and not isinstance(rule, bool):
        return float(rule)
    if rule not in RULES:
        raise ValueError(f"threshold must be a number or one of {', '.join(RULES)}, got {rule!r}")
    scores = scores[~scores.isnan()].double()
    if rule == "quantile":
        return float(scores.quantile(1 - contamination))
    if rule == "mad":
        median = scores.median()
        return float(median + MAD_DEVIATIONS * 1.4826 * (scores - median).abs().median())
    return _peaks_over_threshold(scores, contamination / 10)


def _peaks_over_threshold(scores: Tensor, probability: float) -> float:
    start = float(scores.quantile(1 - POT_TAIL))
    peaks = (scores[scores > start] - start).sort().values
    count = len(peaks)
    if count < 8:  # too few to fit a tail to
        return float(scores.quantile(1 - probability))
    # Hosking and Wallis: with a = E[x], b = E[x (1 - F(x))], shape 2 - a / (a - 2b), scale 2ab / (a - 2b).
    first = float(peaks.mean())
    rank = (torch.arange(count, 0, -1, dtype=torch.float64) - 0.65) / count
    second = float((peaks * rank).mean())
    shape = min(2 - first / (first - 2 * second), 0.5)
    scale = 2 * first * second / (first - 2 * second)
    exceeded = probability * len(scores) / count
    if abs(shape) < 1e-6:
        return start - scale * math.log(exceeded)
    return start + scale / shape * (exceeded**-shape - 1)
