"""A GGUF file is read once, and its weights have the bits that transformers' own reader gives."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from draftree.target.no_loading_bar import no_loading_bar
from draftree.target.target_names import location
from gguf_files import write_gguf

gguf = pytest.importorskip("gguf")
gguf_reader = pytest.importorskip("draftree.target.gguf_reader")

VALUES: dict[str, tuple[Any, Any]] = {
    "strings": (["", "ä", "two words", "x" * 300], gguf.GGUFValueType.STRING),
    "integers": ([1, -2, 3], gguf.GGUFValueType.INT32),
    "floats": ([0.5, -2.25], gguf.GGUFValueType.FLOAT32),
    "switches": ([True, False], gguf.GGUFValueType.BOOL),
    "one": (["alone"], gguf.GGUFValueType.STRING),
}


@pytest.fixture
def lists(tmp_path: Path) -> Path:
    path = tmp_path / "lists.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, (values, kind) in VALUES.items():
        writer.add_key_value(f"x.{name}", values, gguf.GGUFValueType.ARRAY, sub_type=kind)
    writer.add_uint32("x.number", 7)
    writer.add_tensor("a", np.arange(6, dtype=np.float32).reshape(2, 3))
    for write in (
        writer.write_header_to_file,
        writer.write_kv_data_to_file,
        writer.write_tensors_to_file,
    ):
        write()
    writer.close()
    return path


def as_lists(part: Any) -> list[Any]:
    return list(map(int, part)) if isinstance(part, memoryview) else part.tolist()


def test_every_field_is_that_of_the_package_gguf(lists: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import _gguf_parse_value

    own, theirs = gguf_reader.FastReader(lists), gguf.GGUFReader(lists)
    assert list(own.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        found = own.fields[name]
        assert (found.offset, found.data, found.types) == (field.offset, field.data, field.types)
        assert found.contents() == field.contents()
        parsed = [
            [_gguf_parse_value(each.parts[i], each.types) for i in each.data]
            for each in (found, field)
        ]
        assert parsed[0] == parsed[1]
        assert [part.nbytes for part in found.parts] == [part.nbytes for part in field.parts]
    (tensor,) = own.tensors
    assert np.array_equal(tensor.data, theirs.tensors[0].data)
    assert own.fields["x.strings"].contents() == VALUES["strings"][0]


@pytest.mark.parametrize("cut", [70, 90, 130, 200])
def test_a_file_that_ends_within_a_list_is_refused(lists: Path, cut: int) -> None:
    lists.write_bytes(lists.read_bytes()[:cut])
    with pytest.raises((ValueError, IndexError)):
        gguf_reader.FastReader(lists)


WATCHED = (
    "gguf",
    "gguf.constants",
    "gguf.gguf_reader",
    "gguf.quants",
    "gguf.tensor_mapping",
    "transformers.configuration_utils",
    "transformers.core_model_loading",
    "transformers.integrations.gguf.reader",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.modeling_utils",
    "transformers.models.auto.tokenization_auto",
    "transformers.tokenization_utils_tokenizers",
)
"""Modules that read GGUF files, of which nothing may be replaced."""
REPLACED_BY_TRANSFORMERS = {"transformers.modeling_utils.PreTrainedModel.tie_weights"}
"""transformers itself replaces it during each `from_pretrained` (`init.no_tie_weights`)."""


def attributes() -> dict[str, Any]:
    """Return all names of the watched modules, and of the classes that they define."""
    found = dict[str, Any]()
    for name in WATCHED:
        module = importlib.import_module(name)
        for key, value in list(vars(module).items()):
            found[f"{name}.{key}"] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{name}.{key}.{inner}": each for inner, each in vars(value).items()}
    return found


@contextmanager
def noting_replacements() -> Iterator[set[str]]:
    """Compare the watched names whenever a function of a watched module is called."""
    before, replaced = attributes(), set[str]()
    files = {importlib.import_module(name).__file__ for name in WATCHED}
    calls = [0]

    def compare(frame: Any, event: str, _: Any) -> None:
        if event != "call" or frame.f_code.co_filename not in files:
            return
        calls[0] += 1
        if calls[0] <= 20 or calls[0] % 50 == 0:
            now = attributes()
            replaced.update(name for name, value in before.items() if now.get(name) is not value)

    sys.setprofile(compare)
    try:
        yield replaced
    finally:
        sys.setprofile(None)
        assert calls[0] > 20


def test_nothing_is_replaced_while_a_file_is_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "x.gguf")
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    with noting_replacements() as replaced:
        location(str(tmp_path / "x.gguf"))
    assert replaced <= REPLACED_BY_TRANSFORMERS


def test_names_replaced_for_a_while_are_noted(lists: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with noting_replacements() as replaced:
        with monkeypatch.context() as patch:
            patch.setattr(gguf, "dequantize", gguf_reader.dequantise_in_large_groups)
            patch.setattr(gguf.GGUFReader, "get_field", lambda *_: None)
            gguf.GGUFReader(lists)
        gguf.GGUFReader(lists)
    assert {"gguf.dequantize", "gguf.gguf_reader.GGUFReader.get_field"} == replaced


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q6_K", "BF16", "F16", "F32"])
@pytest.mark.parametrize("sizes", [(1, 256), (7, 256), (96, 512), (2, 24, 256), (2048, 256)])
def test_large_groups_have_the_bits_of_small_ones(kind: str, sizes: tuple[int, ...]) -> None:
    sort = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(3).standard_normal(sizes, dtype=np.float32)
    if kind == "Q6_K":  # which `gguf` does not quantise: any bytes are blocks
        width = gguf.GGML_QUANT_SIZES[sort][1] * sizes[-1] // 256
        blocks = np.random.default_rng(4).integers(0, 123, (*sizes[:-1], width)).astype(np.uint8)
    else:
        blocks = gguf.quants.quantize(values, sort)
    expected = gguf.quants.dequantize(blocks, sort)
    found = gguf_reader.dequantise_in_large_groups(blocks, sort)
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape == sizes
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16", "BF16"])
def test_weights_and_tokens_have_the_bits_of_transformers_own_loader(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    path = tmp_path / "x.gguf"
    write_gguf(path, kind)
    made = list[Path]()
    first: Callable[..., None] = gguf.GGUFReader.__init__

    def counted(self: Any, path: Any, *args: Any) -> None:
        made.append(Path(path))
        first(self, path, *args)

    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(gguf.GGUFReader, "__init__", counted)
    folder = Path(location(str(path)))
    assert made.count(path) == 1  # not once for each of transformers' loaders
    found = load_file(folder / "model.safetensors")
    dtype = torch.bfloat16 if kind == "BF16" else torch.float16
    source: dict[str, Any] = {"pretrained_model_name_or_path": tmp_path, "gguf_file": "x.gguf"}
    with no_loading_bar():
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype
        assert torch.equal(found[name].view(torch.int16), weight.view(torch.int16)), name
    saved = AutoTokenizer.from_pretrained(folder)
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(**source).get_vocab()
