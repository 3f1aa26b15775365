"""Entry point of the command line: its commands and exit statuses.

Exit status: 0 done; 2 a user's mistake, told in one line; 128 + the signal that ended it (Ctrl-C
130, SIGTERM 143, SIGHUP 129); 1 anything else, and output found not to be lossless. What needs
torch is imported inside the commands, so that help and mistakes in options do not wait for it.
"""

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, NoReturn

import typer

from draftree.cli import (
    advise,
    bench,
    chat,
    costs,
    datastore,
    doctor,
    env,
    export,
    generate,
    list_parts,
    push,
    replay,
    report,
    serve,
    train,
    tune,
)
from draftree.cli.command import Command, CommandGroup
from draftree.cli.console import fail, remark
from draftree.errors import DraftreeError, DraftreeWarning
from draftree.native import check_variable
from draftree.utils.gc_pause import pause_gc
from draftree.utils.signals import STATUSES, Interrupted, raise_on_signal

app = typer.Typer(
    cls=CommandGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Write exactly what a causal language model would have written, in far fewer forward passes.",
)
COMMANDS: dict[str, dict[str, tuple[Callable[..., None], str]]] = {
    "Write and look up": {
        "generate": (generate.generate, "Answer a prompt, and show what speculation brings"),
        "chat": (chat.chat, "Talk with a model in the terminal"),
        "serve": (serve.serve, "Serve a model over HTTP as OpenAI's API does, with a page"),
        "list": (
            list_parts.list_parts,
            "List models, drafters, policies, acceptors, suites, machines",
        ),
        "drafters": (
            list_parts.list_drafters,
            "List trained drafters by model, shipped and published",
        ),
        "env": (env.show_environment, "Print what a bug report needs: versions, hardware, kernels"),
        "advise": (advise.advise, "Say whether to speculate here, with which drafter and policy"),
    },
    "Measure": {
        "bench": (bench.bench, "Measure speed on prompts, next to plain decoding"),
        "replay": (replay.replay, "Compare drafters and policies on recorded texts"),
        "tune": (tune.tune, "Search for the best options of a policy"),
        "report": (report.report, "Write a saved result as one HTML page"),
        "costs": (costs.show_costs, "Measure what passes cost on this machine"),
        "doctor": (doctor.examine_drafter, "Examine a drafter, or whether the output is lossless"),
    },
    "Train and publish": {
        "train": (train.train, "Train a drafter or fit a policy; go on after an interruption"),
        "export": (export.export_drafter, "Write a drafter in another program's layout"),
        "push": (push.push, "Upload a trained drafter to the Hugging Face hub"),
    },
}
for panel, commands in COMMANDS.items():
    for name, (command, told) in commands.items():
        app.command(name=name, cls=Command, rich_help_panel=panel, short_help=told)(command)
shelf = typer.Typer(
    cls=CommandGroup, help="Build and show the corpora that drafters without training search."
)
app.add_typer(
    shelf,
    name="datastore",
    rich_help_panel="Train and publish",
    short_help="Build and show corpora for retrieval",
)
shelf.command(name="build", cls=Command, short_help="Build a datastore from text")(
    datastore.build_datastore
)
shelf.command(name="show", cls=Command, short_help="Show what a datastore was built from")(
    datastore.show_datastore
)


@app.callback(invoke_without_command=True)
def top(  # noqa: D103
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        from draftree import __version__

        print(__version__)
        raise typer.Exit


def usage_error_text(error: typer.TyperException) -> str:
    """Return typer's message about a wrong argument, with the given value if it is missing."""
    from pydantic import ValidationError

    told, cause = error.format_message().rstrip(".").replace("Value error, ", ""), error.__context__
    given = repr(cause.errors()[0]["input"]) if isinstance(cause, ValidationError) else ""
    return told if given in told else f"{told}; got {given}"


def main(args: Sequence[str] | None = None) -> NoReturn:
    """Run the command that the arguments name, and end the program.

    Args:
        args: arguments after the program's name; by default those of the process.
    """
    run_app(app, "draftree", args)


def run_app(program: typer.Typer, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Run a program, print an error as one line, and end with the exit status that it stands for.

    Args:
        program: commands, or a single one.
        name: how the program is called in help texts.
        args: arguments after the program's name; by default those of the process.
    """
    if not sys.warnoptions:
        warnings.simplefilter("ignore")  # of libraries; python -W shows them
        warnings.simplefilter("default", DraftreeWarning)
        warnings.showwarning = lambda message, *_: remark(str(message))
    signals: list[int] = []
    try:  # a signal may come while handlers are set or reset, too
        with raise_on_signal() as signals, pause_gc():
            try:
                check_variable()
                command = typer.main.get_command(program)
                status = command.main(
                    args if args is None else list(args),
                    prog_name=name,
                    standalone_mode=False,
                )
            except typer.TyperException as error:
                fail(f"{usage_error_text(error)}; --help says what is allowed", 2)
            except DraftreeError as error:
                fail(str(error), 2)
            except Interrupted as ended:
                status = ended.status
            except OSError as error:  # a full disk, a folder of ours that cannot be written
                if not signals:  # else a terminal that was closed
                    fail(
                        f"{error.strerror or error}: '{error.filename}'"
                        if error.filename
                        else str(error),
                        1,
                    )
    except Interrupted as ended:
        status = ended.status
    if signals:
        status = 128 + signals[0]  # typer's own is always that of Ctrl-C
    if status in STATUSES:
        remark("interrupted")
    sys.exit(status or 0)
