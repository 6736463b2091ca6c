"""The command line: each command parses its options, calls one function and prints the result.

Results go to stdout, everything else (progress, notes, errors) to stderr. With --json a command prints one JSON
object as the last line on stdout. A user error gives one sentence and exit code 2. Each file here is a group of
commands; a command imports what it calls inside its function, so that --help is quick.
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
from nanorun.cli import bench, data, eval, make, runs, start, talk, tok, train
from nanorun.errors import UserError

app = typer.Typer(
    help="Train your own language model from raw text.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for ungrouped in (start, make, talk):
    app.add_typer(ungrouped.app)
for group in (train, eval, runs, bench, data, tok):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2])


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(f"nanorun {__version__}")
        raise typer.Exit


# newer versions of typer vendor click, so the base class of usage errors is looked up here
_ClickException: Any = typer.BadParameter.__mro__[2]


def main(args: list[str] | None = None) -> NoReturn:
    # Waiting threads sleep: spinning ones make training ten times slower as soon as anything else runs.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    keep_bytecode()
    signal.signal(signal.SIGTERM, _interrupt)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another
    try:
        code = app(args, standalone_mode=False, prog_name="nanorun")
    except UserError as error:
        _print_error(str(error))
        sys.exit(error.exit_code)
    except _ClickException as error:
        code = _print_usage_error(error)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # click has caught it first
            _exit_on_broken_pipe()
        raise
    except (KeyboardInterrupt, typer.Abort):
        code = 130
    except OSError as error:
        if error.errno == errno.EPIPE:
            _exit_on_broken_pipe()
        if error.errno != errno.ENOSPC:
            raise
        code = _print_error("The output cannot be written: its disk is full.")
    if code == 130:  # also when typer itself has caught the interrupt
        console.say("\nInterrupted. No partial files remain; the same command resumes or starts again.")
    sys.exit(code or 0)


def _exit_on_broken_pipe() -> NoReturn:
    """The reader, such as `| head`, has closed the pipe: exit silently, with the code of SIGPIPE."""
    os._exit(141)  # at once, or Python would report what it cannot flush


def _print_usage_error(error: Any) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message().strip().replace(": Value error, ", ": ")  # as pydantic begins them
    if message.startswith("Usage:"):  # no command: show the help
        print(message)
        return 0
    path = context.command_path.removeprefix("nanorun").strip() if context is not None else ""
    see = f" See {console.command(f'{path} --help'.strip())}." if context is not None else ""
    return _print_error(message.rstrip(".") + "." + see)


def _print_error(sentence: str) -> int:
    console.say(f"nanorun: {sentence}")
    return 2


def _interrupt(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
