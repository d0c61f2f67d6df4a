"""The check record on its way through MyST-NB: kept in the document, shown nowhere."""

import json
from typing import Any, ClassVar

from attention_dynamics.verification.record import MIME_TYPE

RECORD_ATTRIBUTE = "check_record"


class CheckRecordRenderer:
    """Renderer of the record's MIME type: an empty container that carries the record as JSON.

    The visible line is the ``text/html`` of the same output; this container is what the book's
    extension collects. It is registered as a ``myst_nb.mime_renderers`` entry point, so that
    MyST-NB does not warn about an unknown MIME type.
    """

    # No priority: the container must never be chosen over the line in HTML.
    mime_priority_overrides: ClassVar[list[tuple[str, str, int | None]]] = []

    @staticmethod
    def handle_mime(renderer: Any, data: Any, inline: bool) -> list[Any] | None:
        """``record -> [container]``; None for every other MIME type."""
        if data.mime_type != MIME_TYPE:
            return None
        from docutils import nodes

        content = data.content
        record = json.loads(content) if isinstance(content, str) else content
        holder = nodes.inline if inline else nodes.container
        return [holder("", classes=["check-record"], **{RECORD_ATTRIBUTE: json.dumps(record)})]
