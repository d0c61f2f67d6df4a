r"""Machine checks: every numbered statement of the book is proved, certified or measured by one.

``from attention_dynamics.verification import check`` and then, under the formula it checks,
``check.identity("eq-...", lhs, rhs, wrong=...)`` and its siblings. This subpackage knows none of
the others.
"""

from attention_dynamics.verification import checks as check
from attention_dynamics.verification.attack import projected_ascent
from attention_dynamics.verification.record import MIME_TYPE, CheckFailed, CheckRecord

__all__ = ["MIME_TYPE", "CheckFailed", "CheckRecord", "check", "projected_ascent"]
