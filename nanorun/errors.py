"""What goes wrong because of input, files or the state of things, and not because of a bug.

A `UserError` carries one clear sentence that says what to do. The command line prints it on stderr and
exits with code 2; a program that imports nanorun catches it like any exception. Everything else that is
raised is a bug and keeps its traceback.
"""

import json


class UserError(Exception):
    """One sentence for the person at the keyboard: what is wrong, with the value, and what to do."""

    exit_code = 2


def json_fault(error: ValueError) -> str:
    """Where a file stops being JSON, in plain words."""
    if isinstance(error, json.JSONDecodeError):
        return f"line {error.lineno}, column {error.colno}"
    return "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
