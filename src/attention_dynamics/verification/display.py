"""Where the line of a check goes: the cell's output, or standard output."""

import sys

from attention_dynamics.verification.record import CheckRecord


def show(record: CheckRecord) -> None:
    """``record`` -> one line: HTML, text and JSON in a notebook, plain text elsewhere."""
    # IPython is not a dependency: inside a notebook it is already imported.
    ipython = sys.modules.get("IPython")
    if ipython is not None and ipython.get_ipython() is not None:
        from IPython.display import display

        display(record.to_bundle(), raw=True)
    else:
        print(record.to_text())
