"""`draftree push`: writes the model card of a trained drafter and uploads its folder to the hub."""

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.console import emit
from draftree.cli.options import AsJson, Force
from draftree.cli.output_files import check_output
from draftree.errors import UserError
from draftree.utils.files import as_user_error, write_text

UPLOADED_SUFFIXES = (".json", ".safetensors", ".md", ".jinja")
"""Suffixes of the files that are uploaded, besides the file with the weights."""
Folder = Annotated[Path, typer.Argument(help="A trained drafter's folder.")]


def push(
    folder: Folder,
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub.")],
    result: Annotated[
        Path | None,
        typer.Option(help="A result of `bench` with this drafter; the card shows its figures."),
    ] = None,
    licence: Annotated[
        str | None,
        typer.Option(
            "--license", help="Licence for the card, by its name on the hub, such as apache-2.0."
        ),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Write the card, show what would be uploaded, and upload nothing.",
        ),
    ] = False,
    private: Annotated[
        bool, typer.Option("--private", help="If the repository is created, make it private.")
    ] = False,
    force: Force = False,
    as_json: AsJson = False,
) -> None:
    """Upload a trained drafter's folder to the hub, with a model card; training states stay.

    The card is README.md in the folder. It is written if it is missing, or if --result or --license is given.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    from draftree.cli import terminal

    told = f"the repository is '{repository}', allowed is OWNER/NAME"
    if "/" not in repository:
        raise UserError(told)
    with as_user_error(told):
        validate_repo_id(repository)
    weights = weight_file(folder)
    card = write_card(folder, result, licence, force)
    sizes = {
        p.name: p.stat().st_size
        for p in sorted(folder.iterdir())
        if p.is_file() and (p.suffix in UPLOADED_SUFFIXES or p.name == weights)
    }
    if not dry_run:
        with as_user_error(f"cannot upload to '{repository}'"):
            HfApi().create_repo(repository, private=private, exist_ok=True)
            with terminal.busy("uploading"):
                HfApi().upload_folder(
                    repo_id=repository, folder_path=folder, allow_patterns=list(sizes)
                )
    if as_json:
        emit({"repository": repository, "files": sizes, "card": card, "uploaded": not dry_run})
        return
    if card is not None:
        terminal.line(f"The card is '{card}'.")
    verb = "would be uploaded" if dry_run else "uploaded"
    told = ", ".join(f"{name} ({size / 1e6:.1f} MB)" for name, size in sizes.items())
    terminal.line(f"{repository}: {told}: {sum(sizes.values()) / 1e6:.1f} MB {verb}")


def weight_file(folder: Path) -> str:
    """Return the name of the file with the weights in a trained drafter's folder.

    Raises:
        UserError: the folder has no config or no weights.
    """
    from draftree.formats.checkpoint import WEIGHT_FILES, Checkpoint
    from draftree.registry import part

    method = Checkpoint.at(folder).about.get("drafter")
    names = WEIGHT_FILES
    if method is not None:
        names = getattr(part("drafter", str(method)), "files", WEIGHT_FILES)
    found = next((name for name in names if (folder / name).is_file()), None)
    if found is None:
        told = "needed is a trained drafter's folder"
        raise UserError(f"'{folder}' holds no {' or '.join(names)}: {told}")
    return found


def write_card(folder: Path, result: Path | None, licence: str | None, force: bool) -> str | None:
    """Write a drafter's model card if it is missing, or if its contents are given.

    Args:
        folder: folder of the trained drafter.
        result: saved result with the drafter's figures; None for a card without figures.
        licence: licence of the card, by the hub's name for it.
        force: whether an existing card may be overwritten.

    Returns:
        Path of the card; None if an existing card stays as it is.

    Raises:
        UserError: the card exists and is not to be overwritten, or the result has no such drafter.
    """
    from draftree.evaluation import model_card, result_rows

    path = folder / model_card.CARD
    if path.is_file() and result is None and licence is None:
        return None
    if result is not None and not result.exists():
        raise UserError(f"--result is '{result}', but there is no such file")
    if path.exists() and not force:
        kept = "without --result and --license it stays as it is"
        raise UserError(f"'{path}' exists; --force overwrites it, {kept}")
    check_output(path, force)
    if result is None:
        text = model_card.card(folder, None, licence)
    else:
        saved = result_rows.read_result(result)
        with result_rows.as_result_error(result):
            text = model_card.card(folder, saved, licence)
    write_text(path, text)
    return str(path)
