"""The source text of a call's arguments, read from the calling frame."""

import ast
import linecache
import types


def call_arguments(frame: types.FrameType, label: str) -> dict[int | str, str]:
    """``{0: "label", 1: "actual", ..., "wrong": "twin"}``: the arguments of the call as written.

    ``frame`` is the caller's frame. The call is found by its position in the source and, where
    positions are missing, as the call whose first argument is the constant ``label``. Returns an
    empty dict where there is no source (an interactive prompt without history).
    """
    code = frame.f_code
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    try:
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    except SyntaxError:
        return {}
    position = list(code.co_positions())[frame.f_lasti // 2]
    matching = [call for call in calls if _position(call) == position]
    if not matching:
        matching = [
            call
            for call in calls
            if call.args and isinstance(call.args[0], ast.Constant) and call.args[0].value == label
        ]
        matching.sort(key=lambda call: abs(call.lineno - frame.f_lineno))
    if not matching:
        return {}
    call = matching[0]
    arguments: dict[int | str, str] = {
        number: ast.unparse(node) for number, node in enumerate(call.args)
    }
    arguments |= {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
    return arguments


def _position(call: ast.Call) -> tuple[int, int | None, int, int | None]:
    return call.lineno, call.end_lineno, call.col_offset, call.end_col_offset
