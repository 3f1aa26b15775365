"""A GGUF file is read once, and its weights have the bits that transformers' own reader gives."""

from collections.abc import Callable
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


def test_one_reader_serves_one_file_while_the_context_lasts(lists: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(lists.read_bytes())
    names = ("GGUFReader", "get_tensor_name_map", "dequantize")
    former = [getattr(gguf, name) for name in names]
    arch = gguf.MODEL_ARCH.LLAMA
    with gguf_reader.fast_loading(lists) as reader:
        assert gguf.GGUFReader(lists) is reader
        assert gguf.GGUFReader(str(lists)) is reader
        assert type(gguf.GGUFReader(other)) is former[0]
        assert gguf.get_tensor_name_map(arch, 1) is gguf.get_tensor_name_map(arch, 1)
    assert [getattr(gguf, name) for name in names] == former
    with pytest.raises(KeyError), gguf_reader.fast_loading(lists):
        raise KeyError
    assert [getattr(gguf, name) for name in names] == former


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
    assert made == [path]  # not once for each of transformers' loaders
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
