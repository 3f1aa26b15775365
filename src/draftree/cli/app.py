"""The command line; other programs rely on its options, its JSON and its exit status.

Exit status: 0 done; 2 a user's mistake, told in one line; 128 + the signal that ended it (Ctrl-C 130, SIGTERM 143, SIGHUP
129); 1 anything else, and output found not to be lossless. What needs torch is imported inside the commands, so that help
and mistakes in options do not wait for it.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from draftree.boundary.garbage import seldom
from draftree.boundary.interruption import STATUSES, Interrupted, raised
from draftree.cli import (
    advise,
    analyse,
    bench,
    card,
    costs,
    datastore,
    doctor,
    export,
    generate,
    parts,
    recount,
    replay,
    report,
    tables,
    train,
    tune,
)
from draftree.cli.console import fail, remark
from draftree.errors import DraftreeError, DraftreeWarning, UnknownName, UserError
from draftree.native import check_variable


class Commands(TyperGroup):
    """The commands; for one that does not exist, the nearest is named."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if not cmd_name.startswith("-") and cmd_name not in self.commands:
            raise UnknownName("command", cmd_name, self.commands)
        return super().get_command(ctx, cmd_name)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args:
            known = ", ".join(sorted(self.commands))
            raise UserError(f"no command was given, known are {known}; {ctx.command_path} --help explains them")
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    help="Exactly what a causal language model would have written anyway, in far fewer forward passes.",
)
shelf = typer.Typer(cls=Commands, help="Build and show the corpora that drafters without training search.")
app.add_typer(shelf, name="datastore")
COMMANDS: dict[str, Callable[..., None]] = {
    "generate": generate.generate,
    "list": parts.list_parts,
    "drafters": parts.list_drafters,
    "advise": advise.advise,
    "bench": bench.bench,
    "replay": replay.replay,
    "tune": tune.tune,
    "analyse": analyse.analyse,
    "report": report.report,
    "tables": tables.tables,
    "recount": recount.recount,
    "costs": costs.show_costs,
    "doctor": doctor.examine_drafter,
    "train": train.train,
    "export": export.export_drafter,
    "card": card.write_card,
    "push": card.push,
}
for name, command in COMMANDS.items():
    app.command(name=name)(command)
shelf.command(name="build")(datastore.build_datastore)
shelf.command(name="show")(datastore.show_datastore)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        from draftree import __version__

        print(__version__)
        raise typer.Exit


def mistake(error: typer.TyperException) -> str:
    """Typer's message about a mistake on the command line, with what was given where typer leaves that out."""
    from pydantic import ValidationError

    told, cause = error.format_message().rstrip("."), error.__context__
    given = repr(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return told if given in told else f"{told}; got {given}"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and ends the program.

    Args:
        args: what stands behind the program's name; the process's own by default.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; python -W shows them
        warnings.simplefilter("default", DraftreeWarning)
        warnings.showwarning = lambda message, *_: remark(str(message))
    with raised() as signals, seldom():
        try:
            check_variable()
            command = typer.main.get_command(app)
            status = command.main(args if args is None else list(args), prog_name="draftree", standalone_mode=False)
        except typer.TyperException as error:
            fail(f"{mistake(error)}; what is allowed is told by --help", 2)
        except DraftreeError as error:
            fail(str(error), 2)
        except Interrupted as ended:
            status = ended.status
        except OSError as error:  # a full disk, a folder of ours that cannot be written
            if not signals:  # else a terminal that was closed
                fail(f"{error.strerror or error}: '{error.filename}'" if error.filename else str(error), 1)
    if signals:
        status = 128 + signals[0]  # typer's own is always that of Ctrl-C
    if status in STATUSES:
        remark("interrupted")
    sys.exit(status or 0)
