"""Errors caused by input, files or the environment, as opposed to bugs.

A `UserError` carries one clear sentence that says what to do. The command line prints it on stderr and exits with
code 2; a program that imports nanorun catches it like any exception. Any other exception is a bug and keeps its
traceback.
"""


class UserError(Exception):
    """One sentence for the user: what is wrong, with the value, and what to do."""

    exit_code = 2
