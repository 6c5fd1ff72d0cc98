"""Is a converted model the same as the original? The judge, and the verifier built on it."""

from ._assert import (
    LinearResult,
    assert_as_accurate,
    assert_linear_as_accurate,
    judge_linear,
    plain_linear,
    run_linear,
)
from ._compare import Comparison
from ._judge import Judgement, Verdict
from ._report import Check, EquivalenceError, Report
from ._verify import verify

__all__ = [
    "Check",
    "Comparison",
    "EquivalenceError",
    "Judgement",
    "LinearResult",
    "Report",
    "Verdict",
    "assert_as_accurate",
    "assert_linear_as_accurate",
    "judge_linear",
    "plain_linear",
    "run_linear",
    "verify",
]
