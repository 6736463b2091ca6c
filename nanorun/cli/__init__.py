"""The command line: each verb parses its options, calls one function and prints what it returned.

Results go to stdout, everything else (progress, notes, errors) to stderr. With --json a verb prints one
JSON object as the last thing on stdout. A person's mistake gives one sentence and exit code 2. A file here is a
group of verbs; what a verb calls is imported inside it, so that --help is quick.
"""

import errno
import os
import signal
import sys
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer

from nanorun import __version__, console
from nanorun.bytecode import keep_bytecode
from nanorun.cli import bench, data, eval, start, talk, tok, train
from nanorun.errors import UserError

app = typer.Typer(
    help="Train your own language model from raw text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for first in (start, talk):
    app.add_typer(first.app)
for group, name in ((train, "train"), (eval, "eval"), (bench, "bench"), (data, "data"), (tok, "tok")):
    app.add_typer(group.app, name=name)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nanorun {__version__}")
        raise typer.Exit


# typer carries its own copy of click in newer versions, so its base of all usage errors is found here
_ClickException: Any = typer.BadParameter.__mro__[2]


def main(args: list[str] | None = None) -> NoReturn:
    # Threads that wait asleep: spinning ones make training ten times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_bytecode()
    signal.signal(signal.SIGTERM, _stop)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a terminal without our signs shows others, it does not fail
            stream.reconfigure(errors="replace")
    try:
        code = app(args, standalone_mode=False, prog_name="nanorun")
    except UserError as error:
        _complain(str(error))
        sys.exit(error.exit_code)
    except _ClickException as error:
        code = _explain_usage(error)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # click has seen it first
            _reader_went_away()
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        if error.errno == errno.EPIPE:
            _reader_went_away()
        if error.errno != errno.ENOSPC:
            raise
        code = _complain("The output cannot be written, its disk is full.")
    if code == 130:  # also when typer itself has caught the interruption
        console.say("\nStopped. Nothing half-written was kept; the same command goes on or starts again.")
    sys.exit(code or 0)


def _reader_went_away() -> NoReturn:
    """`| head` has seen enough: end without a word, with the code of one whom SIGPIPE ended."""
    os._exit(141)  # at once, or Python would complain about what it cannot flush


def _explain_usage(error: Any) -> int:
    context, message = getattr(error, "ctx", None), error.format_message().strip()
    if message.startswith("Usage:"):  # nothing was asked for: show what there is
        print(message)
        return 0
    see = f" See {context.command_path} --help." if context is not None else ""
    return _complain(message.rstrip(".") + "." + see)


def _complain(sentence: str) -> int:
    console.say(f"nanorun: {sentence}")
    return 2


def _stop(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
