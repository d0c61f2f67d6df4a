r"""The checks a chapter calls: ``check.identity``, ``close``, ``bound``, ``band``, ``enclosure``.

Each raises :class:`CheckFailed` when the statement does not hold, and when its wrong twin does;
each shows one quiet line with the expression it checked and returns its :class:`CheckRecord`.
"""

from attention_dynamics.verification.measured import band, bound, close
from attention_dynamics.verification.record import CheckFailed, CheckRecord
from attention_dynamics.verification.symbolic import enclosure, identity

__all__ = ["CheckFailed", "CheckRecord", "band", "bound", "close", "enclosure", "identity"]
