"""`draftree export`: writes a drafter in another format."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from draftree.aliases import nearest
from draftree.cli.console import emit
from draftree.cli.option_checks import NAMED_TARGETS
from draftree.cli.options import AsJson, Force, dataclass_command
from draftree.cli.output_files import check_output, default_name
from draftree.errors import UserError
from draftree.utils.validated_dataclass import knob

EXPORT_FORMATS = ("speculators", "eagle", "vllm-eagle", "vllm-medusa")
"""Names of the formats in `draftree.training.export`. They are repeated here, because importing
that module takes long."""


@dataclass(frozen=True)
class ExportOptions:
    """Store the options of `draftree export`."""

    name: Annotated[
        str,
        typer.Argument(
            metavar="DRAFTER",
            help="A drafter's folder, of draftree or published, or a shipped one: eagle3, smollm2/eagle3.",
        ),
    ]
    wanted: str | None = knob(
        None,
        flag="--format",
        metavar="FORMAT",
        help="speculators, eagle, vllm-eagle or vllm-medusa; by default the first that supports the drafter.",
    )
    alone: bool = knob(
        False,
        flag="--standalone",
        help="Write draftree's own layout, with an embedding and a head of its own: edd, glide, vdm.",
    )
    out: Path | None = knob(
        None, short="-o", help="The new folder; by default DRAFTER-FORMAT in this one."
    )
    force: Force = False
    target: str | None = knob(
        None,
        short="-m",
        metavar="MODEL",
        help="The drafter's target; by default the one its checkpoint names.",
    )
    as_json: AsJson = False


@dataclass_command
def export_drafter(ctx: typer.Context, asked: ExportOptions) -> None:
    """Write a drafter in the layout that another program reads.

    speculators: the library of that name, and vLLM. eagle: the official code of EAGLE, SGLang, and
    vLLM for an eagle3. vllm-eagle, vllm-medusa: vLLM.
    """
    if asked.name in NAMED_TARGETS or asked.wanted not in (None, *EXPORT_FORMATS):
        got = (
            f"--format is '{asked.wanted}'"
            if asked.wanted not in (None, *EXPORT_FORMATS)
            else f"'{asked.name}' is a model"
        )
        formats = f"formats are {', '.join(EXPORT_FORMATS)}"
        near = nearest("format", asked.wanted or "", EXPORT_FORMATS)
        raise UserError(
            f"{got}, but draftree export writes drafters, not models, as draftree export eagle3; {formats}"
            + (f"; did you mean '{near}'?" if near and near != asked.wanted else "")
        )
    from draftree.cli import arguments, terminal
    from draftree.training.export import drafter_folder, export, first_format, standalone

    if asked.alone and asked.wanted is not None:
        raise UserError(
            f"--format {asked.wanted} and --standalone were given, allowed is one of them"
        )
    folder = drafter_folder(asked.name, asked.target)
    wanted = "standalone" if asked.alone else first_format(folder, asked.wanted)
    out = asked.out or Path(default_name(*Path(asked.name).parts[-2:], wanted))
    overwrite = check_output(out, asked.force, folder=True)
    arguments.quiet()
    with terminal.busy("exporting"):
        if asked.alone:
            done = standalone(folder, out, asked.target, overwrite)
        else:
            done = export(folder, wanted, out, asked.target, overwrite)
    if asked.as_json:
        emit(asdict(done))
    else:
        terminal.line(
            f"{done.out}: '{done.drafter}' as {done.format}, {done.tensors} tensors, {done.bytes / 1e6:.1f} MB"
        )
