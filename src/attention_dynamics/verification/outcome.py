"""What every check shares: its label, the calling source, the record it shows and returns."""

import inspect
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from attention_dynamics.verification.record import CheckRecord


def finish(
    label: str,
    kind: str,
    title: str,
    uses: Sequence[str],
    *,
    status: str = "passed",
    **fields: Any,
) -> CheckRecord:
    """The record of a check that held, shown; ``TypeError`` for ``uses`` given as one string."""
    if isinstance(uses, str):
        raise TypeError(f"{label}: uses={uses!r} must be a sequence of labels, not one string")
    record = CheckRecord(
        label=label, kind=kind, status=status, title=title, uses=tuple(uses), **fields
    )
    show(record)
    return record


def show(record: CheckRecord) -> None:
    """``record`` -> one line: HTML, text and JSON in a notebook, plain text elsewhere."""
    # IPython is not a dependency: inside a notebook it is already imported.
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from IPython.display import display

        display(record.to_bundle(), raw=True)
    else:
        print(record.to_text())


def require_label(label: str) -> None:
    """``ValueError`` unless the label is a non-empty text without blanks around it."""
    if not isinstance(label, str) or not label.strip() or label != label.strip():
        raise ValueError(f"label={label!r} must be the label of the statement, such as 'eq-...'")


def caller() -> Any:
    """The frame that called the check."""
    frame = inspect.currentframe()
    for _ in range(2):
        frame = frame.f_back if frame is not None else None
    return frame


def relation_of(
    arguments: Mapping[int | str, str], left: str, relation: str, right: str, first: int = 1
) -> str:
    """``left relation right`` in the words of the source."""
    lhs = arguments.get(first, arguments.get(left, left))
    rhs = arguments.get(first + 1, arguments.get(right, right))
    return f"{lhs} {relation} {rhs}"
