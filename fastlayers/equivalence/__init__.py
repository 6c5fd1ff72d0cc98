"""Is a converted model the same as the original? The judge, and the verifier built on it."""

from ._assert import (
    LinearResult,
    assert_as_accurate,
    assert_linear_as_accurate,
    judge_linear,
    plain_linear,
    run_linear,
)
from ._judge import Judgement, Verdict

__all__ = [
    "Judgement",
    "LinearResult",
    "Verdict",
    "assert_as_accurate",
    "assert_linear_as_accurate",
    "judge_linear",
    "plain_linear",
    "run_linear",
]
