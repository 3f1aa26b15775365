"""Run a script of benchmarks with the options, messages and exit statuses of the command line."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

import typer

from draftree.cli.app import run_app
from draftree.cli.command import Command


def run(command: Callable[..., None], args: Sequence[str] | None = None) -> NoReturn:
    """Run a function as the only command of a script, and end the program.

    Args:
        command: function that typer can read, such as one of `dataclass_command`.
        args: arguments after the script's name; by default those of the process.
    """
    run_app(as_program(command), f"python benchmarks/{Path(sys.argv[0]).name}", args)


def as_program(command: Callable[..., None]) -> typer.Typer:
    """Return a program of a single command, which takes its options without a name before them."""
    app = typer.Typer(add_completion=False)
    app.command(cls=Command)(command)
    return app
