"""GGUF files: numbers of the header are checked against the tensors, and split files are read from any part.

https://github.com/huggingface/transformers/issues/32266: files that were split are not read.
"""

import multiprocessing
import os
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader
from safetensors.torch import load_file

from architectures import build
from draftree.engine import load
from draftree.errors import UserError
from draftree.target import gguf_conversion
from kind_models import gguf_tensors, write_gguf
from reports import report

pytestmark = pytest.mark.usefixtures("quick")
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def tensors() -> dict[str, Any]:
    return gguf_tensors(
        build("llama", {"vocab_size": 261, "num_hidden_layers": 2, "max_position_embeddings": 256})
    )


def split(
    folder: Path, tensors: dict[str, Any], parts: int, total: int | None = None, **header: int
) -> list[Path]:
    """Write a model in parts, as llama.cpp names them; only the first one has the header."""
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    paths = []
    for number in range(parts):
        mine = {name: tensors[name] for name in names[number::parts]}
        path = folder / f"tiny-{number + 1:05}-of-{parts:05}.gguf"
        paths.append(write_gguf(path, mine, (number, parts, total or len(names)), **header))
    return paths


def text(path: Path) -> list[int]:
    """What a file's model writes."""
    return load(str(path), "suffix").complete("hello he", max_new_tokens=12).tokens


@report(
    "huggingface/transformers#32266",
    "GGUF files",
    "Files that are split into parts could not be read.",
)
@pytest.mark.parametrize("parts", [2, 3])
def test_a_split_file_is_read_from_any_of_its_parts(
    parts: int, tensors: dict[str, Any], tmp_path: Path
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tensors)
    folder = gguf_conversion.dequantise(whole)
    paths = split(tmp_path / "split", tensors, parts)
    joined = {gguf_conversion.dequantise(path) for path in paths}
    assert len(joined) == 1, "one copy for all parts"
    ours, theirs = (load_file(place / "model.safetensors") for place in (*joined, folder))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    assert text(paths[0]) == text(paths[-1]) == text(whole)
    assert not list(folder.parent.glob(".*.partial")), "nothing is left of the joined file"


def test_the_joined_file_has_the_whole_header(tensors: dict[str, Any], tmp_path: Path) -> None:
    whole, paths = (
        write_gguf(tmp_path / "whole.gguf", tensors),
        split(tmp_path / "split", tensors, 2),
    )
    gguf_conversion._join(tmp_path / "joined.gguf", [GGUFReader(path) for path in paths])
    one, other = GGUFReader(whole), GGUFReader(tmp_path / "joined.gguf")
    for name, entry in one.fields.items():
        if not name.startswith("GGUF."):
            assert other.fields[name].contents() == entry.contents(), name


@pytest.mark.parametrize("asked", [0, 2])
def test_a_missing_part_is_named(
    asked: int, tensors: dict[str, Any], tmp_path: Path, draftree: Command
) -> None:
    paths = split(tmp_path, tensors, 3)
    paths[1].unlink()
    status, out, err = draftree("generate", "he", "--target", paths[asked], "--drafter", "suffix")
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert f"{paths[1]}' is missing: '{paths[asked].name}' is one of 3 parts" in err


def test_a_part_of_another_model_is_named(tensors: dict[str, Any], tmp_path: Path) -> None:
    paths = split(tmp_path / "a", tensors, 2)
    names = list(tensors)
    other = {name: tensors[name] for name in names[:5]}
    write_gguf(paths[1], other, (1, 2, 99))
    with pytest.raises(
        UserError, match=r"tiny-00002-of-00002.gguf' belongs to a model of 99 tensors"
    ):
        gguf_conversion.dequantise(paths[0])
    write_gguf(paths[1], other, (1, 3, len(names)))
    with pytest.raises(
        UserError,
        match=r"tiny-00002-of-00002.gguf' is part 2 of 3 by its header, allowed is part 2 of 2",
    ):
        gguf_conversion.dequantise(paths[0])
    write_gguf(paths[1], other, (1, 2, len(names)))
    with pytest.raises(UserError, match="which another part has, too: it belongs to another model"):
        gguf_conversion.dequantise(paths[0])
    write_gguf(paths[1], {names[1]: tensors[names[1]]}, (1, 2, len(names)))
    with pytest.raises(
        UserError, match=f"have {len(names[::2]) + 1} tensors, allowed are {len(names)}"
    ):
        gguf_conversion.dequantise(paths[0])


def test_a_part_under_another_name_is_named(tensors: dict[str, Any], tmp_path: Path) -> None:
    paths = split(tmp_path, tensors, 2)
    lost = paths[1].rename(tmp_path / "second.gguf")
    with pytest.raises(UserError, match=r"is part 2 of 2 by its header.*NAME-00001-of-00002"):
        gguf_conversion.dequantise(lost)
    with pytest.raises(UserError, match="is named as part 3 of 2"):
        gguf_conversion.dequantise(paths[0].rename(tmp_path / "tiny-00003-of-00002.gguf"))


WRONG = {
    "block_count": 260, "embedding_length": 4096, "feed_forward_length": 1 << 30, "attention.head_count": 1 << 20,
    "attention.head_count_kv": 1 << 20, "vocab_size": 1 << 30, "attention.key_length": 1 << 20,
    "attention.value_length": 1 << 20, "expert_count": 1 << 20, "rope.dimension_count": 1 << 30,
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_a_number_that_the_tensors_do_not_have_is_refused(
    name: str, tensors: dict[str, Any], tmp_path: Path
) -> None:
    path = write_gguf(tmp_path / "wrong.gguf", tensors, **{name.replace(".", "__"): WRONG[name]})
    with pytest.raises(
        UserError, match=rf"llama\.{name} is {WRONG[name]}, allowed by its tensors is"
    ):
        gguf_conversion.dequantise(path)


def test_a_header_of_more_weights_than_there_are_is_refused(
    tensors: dict[str, Any], tmp_path: Path
) -> None:
    path = write_gguf(
        tmp_path / "wrong.gguf", tensors, feed_forward_length=261, attention__key_length=260
    )
    with pytest.raises(UserError, match=r"a header for \d+ weights, allowed by its tensors are"):
        gguf_conversion.dequantise(path)


def test_missing_tensors_are_named(tensors: dict[str, Any], tmp_path: Path) -> None:
    some = {name: value for name, value in tensors.items() if name != "blk.1.ffn_up.weight"}
    with pytest.raises(UserError, match=r"lacks|weights"):
        gguf_conversion.dequantise(write_gguf(tmp_path / "wrong.gguf", some))


def costs(paths: list[Path], told: Any) -> None:
    """Read files in a process of its own; tell seconds and kilobytes that it took to refuse them."""
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for path in paths:
        with pytest.raises(UserError):
            gguf_conversion.dequantise(path)
    told.put(
        (
            time.process_time() - start,
            resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before,
        )
    )


def test_a_wrong_header_costs_little(tensors: dict[str, Any], tmp_path: Path) -> None:
    paths = [
        write_gguf(tmp_path / f"{i}.gguf", tensors, **{name.replace(".", "__"): value})
        for i, (name, value) in enumerate(WRONG.items())
    ]
    os.truncate(paths[0], 8 << 30)  # which takes no place on the disk; to read it all takes seconds
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    process = fork.Process(target=costs, args=(paths, told))
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of forking beside threads: torch runs on one here
        process.start()
    process.join()
    assert process.exitcode == 0
    seconds, kilobytes = told.get()
    assert seconds / len(paths) < 1
    assert kilobytes < 200_000
