"""`nanorun runs`: list, show, rename, remove."""

import sys
from typing import Annotated

import typer

from nanorun import console, tables
from nanorun.cli.options import Json, example, show
from nanorun.errors import UserError

app = typer.Typer(invoke_without_command=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="A run's name.")]


@app.callback(epilog=example("nanorun runs"))
def runs(context: typer.Context, as_json: Json = False) -> None:
    """Trained models and unfinished runs: list (also without a command), show, rename, remove."""
    if context.invoked_subcommand is None:
        runs_list(as_json)


@app.command("list", epilog=example("nanorun runs list --json"))
def runs_list(as_json: Json = False) -> None:
    """Lists the runs, the last trained first, with their scores and what each came from."""
    from nanorun.run_list import list_records

    records = list_records()
    show({"runs": records}, as_json, tables.runs_table(records))


@app.command("show", epilog=example("nanorun runs show sample-rl"))
def runs_show(name: Name, as_json: Json = False) -> None:
    """Shows one run: settings, figures, files, and the commands to resume it and to chat with it."""
    from nanorun.run_list import show_record

    record = show_record(name)
    show(record, as_json, tables.run_page(record))


@app.command("rename", epilog=example("nanorun runs rename base-d12 notes"))
def runs_rename(
    old: Annotated[str, typer.Argument(metavar="OLD", help="A run's name.")],
    new: Annotated[str, typer.Argument(metavar="NEW", help="Its new name.")],
    as_json: Json = False,
) -> None:
    """Renames a run, also where runs that came from it name their parent."""
    from nanorun.run_list import rename

    result = rename(old, new)
    also = f"; now the parent of {tables.quoted(result['children'])}" if result["children"] else ""
    show(result, as_json, f"'{old}' is now '{new}'{also}")


@app.command("remove", epilog=example("nanorun runs remove base-d12 sft-d12"))
def runs_remove(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of runs.")],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    as_json: Json = False,
) -> None:
    """Deletes runs with all their files, after asking. A run that an unfinished one started from is kept."""
    from nanorun.run_list import check_removal, remove

    names = list(dict.fromkeys(names))
    result = check_removal(names)
    what = console.visible(f"{tables.quoted(names)} ({console.size(result['bytes'])})")
    if result["children"]:
        console.say(
            f"{tables.quoted(result['children'])} came from it: that stays, but cannot become longer."
        )
    if not yes:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise UserError(f"This would delete {what} for good: add --yes to confirm.")
        if not typer.confirm(f"Delete {what} for good?", err=True):
            raise typer.Exit(2)
    remove(names)
    show(result, as_json, f"removed {what}")
