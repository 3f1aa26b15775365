"""Seeded mutations of files: bytes, the structure of JSON, and the headers of safetensors, GGUF and NumPy files."""

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

DEEP = "[" * 10000 + "]" * 10000
ODD: list[Any] = [
    None,
    True,
    False,
    -1,
    0,
    1,
    2,
    3,
    7,
    10**6,
    10**12,
    2**31,
    2**63,
    10**400,
    -(10**12),
    0.5,
    -1.5,
    1e300,
    float("nan"),
    float("inf"),
    -float("inf"),
    "",
    "x",
    "7",
    "\ud800",
    "\0",
    "../..",
    "a" * 9000,
    [],
    [0],
    [[]],
    [1, "x"],
    [None] * 2000,
    {},
    {"a": None},
    {"x": {"y": [1]}},
]
BROKEN_TEXTS = (
    "",
    "null",
    "[]",
    "{}",
    "3",
    '"x"',
    DEEP,
    '{"a":' * 10000,
    "\0",
    "NaN",
    "\ufeff{}",
    "[" * 100,
)
NUMBERS = (
    0,
    1,
    2,
    3,
    7,
    255,
    2**16,
    10**9,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
DTYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "I64",
    "I32",
    "I8",
    "U8",
    "BOOL",
    "F8_E4M3",
    "F4",
    "C64",
    "X",
    "",
    3,
    None,
)


def entries(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every entry of a JSON value: its container, and its key or index."""
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield value, key
        yield from entries(value[key])


def mutate_json(text: str, rng: random.Random) -> str:
    """Return JSON with one entry removed, renamed, nested, repeated, duplicated or replaced; seldom no JSON at all."""
    value = json.loads(text)
    found = list(entries(value))
    if not found or rng.random() < 0.06:
        return rng.choice([text[: rng.randrange(1 + len(text))], *BROKEN_TEXTS])
    container, key = rng.choice(found)
    how = rng.randrange(12)
    if how == 0:
        del container[key]
    elif how == 1 and isinstance(container, dict):
        others = [k for k in container if k != key] or [""]
        container[rng.choice([f"{key}x", "", "draftree", rng.choice(others)])] = container.pop(key)
    elif how == 2:
        return json.dumps(value).replace(
            json.dumps(container[key]), rng.choice([DEEP, "1e999", "NaN", "-0", "1" * 5000]), 1
        )
    elif how == 3:
        container[key] = rng.choice([[container[key]], {"x": container[key]}, str(container[key])])
    elif how == 4 and isinstance(container, dict):
        pair = f"{json.dumps(key)}: {json.dumps(container[key])}"
        return json.dumps(value).replace(
            pair, f"{pair}, {json.dumps(key)}: {json.dumps(rng.choice(ODD))}", 1
        )
    elif how == 5 and isinstance(container[key], list | str):
        container[key] = container[key] * rng.choice([0, 2, 3])
    elif how == 6 and isinstance(container[key], int | float):
        container[key] = rng.choice(
            [container[key] + 1, container[key] - 1, -container[key], container[key] * 1000]
        )
    elif how == 7:
        value = [value] if rng.random() < 0.5 else {"x": value}
    else:
        container[key] = rng.choice(ODD)
    return json.dumps(value)


def mutate_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return bytes that are cut, extended or changed; most changes are near the beginning, where headers are."""
    how = rng.randrange(8)
    if how < 2:
        return content[: rng.choice([0, rng.randrange(1 + len(content))])]
    if how == 2 or not content:
        return content + rng.randbytes(rng.randrange(1, 99))
    changed = bytearray(content)
    if how < 5:
        place = rng.randrange(1 + min(len(changed), 2000))
        if how == 3:
            changed[place:place] = rng.choice(
                [rng.randbytes(rng.randrange(1, 40)), bytes(8), b"\xff" * 8]
            )
        else:
            del changed[place : place + rng.randrange(1, 40)]
        return bytes(changed)
    for _ in range(rng.choice([1, 1, 3, 20])):
        place = rng.randrange(len(changed) if rng.random() < 0.3 else min(len(changed), 2000))
        changed[place] = rng.choice([rng.randrange(256), changed[place] ^ (1 << rng.randrange(8))])
    return bytes(changed)


def mutate_safetensors_header(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with one wrong name, dtype, shape, offset or length in its header."""
    length = int.from_bytes(content[:8], "little")
    header, body = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = rng.choice([n for n in header if n != "__metadata__"])
    entry, how = header[name], rng.randrange(9)
    if how == 0:
        entry["dtype"] = rng.choice(DTYPES)
    elif how == 1:
        shape = entry["shape"]
        odd = [
            [],
            [0],
            [-1],
            [1.5],
            ["2"],
            [2**62, 4],
            [2**63],
            shape[::-1],
            [*shape, 1],
            [10**9, *shape],
            None,
            3,
        ]
        entry["shape"] = rng.choice(odd)
    elif how == 2:
        start, end = entry["data_offsets"]
        other = rng.choice([e for n, e in header.items() if n != "__metadata__"])["data_offsets"]
        odd = [
            [end, start],
            [start, end + 4],
            [start - 4, end],
            [0, 0],
            [-1, 4],
            [start, 2**63],
            [2**64, 2**64],
            other,
            [0],
            [],
        ]
        entry["data_offsets"] = rng.choice(
            [*odd, [start, start], [0, len(body)], [start + 0.5, end], None]
        )
    elif how == 3:
        header[f"{name}{rng.choice(['x', '', '.weight'])}"] = header.pop(name)
    elif how == 4:
        del entry[rng.choice(sorted(entry))]
    elif how == 5:
        header["__metadata__"] = rng.choice(
            [None, 3, [], {"format": 3}, {"format": "tf"}, {"a": {"b": {}}}, {"format": "x" * 9000}]
        )
    elif how == 6:
        return rng.choice(NUMBERS).to_bytes(8, "little") + content[8:]
    elif how == 7:
        first = json.dumps(header)
        text = f"{first[:-1]}, {json.dumps(name)}: {json.dumps(rng.choice([entry, {}, None]))}}}".encode()
        return len(text).to_bytes(8, "little") + text + body
    else:
        text = mutate_json(json.dumps(header), rng).encode("utf-8", "surrogatepass")
        return len(text).to_bytes(8, "little") + text + body
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def mutate_gguf_header(content: bytes, rng: random.Random) -> bytes:
    """Return a GGUF file with one wrong count, length, type, value, dimension or offset in its header."""
    changed = bytearray(content)
    names = [m.span() for m in re.finditer(rb"[a-z_]+(\.[a-z0-9_]+)+", content)]
    start, end = rng.choice(names)
    places = [4, 8, 16, start - 8, end, end, end + 4, end + 4, end + 8, end + 12, end + 20]
    place = rng.choice([p for p in places if p + 8 <= len(content)])
    small = rng.random() < 0.6
    number = rng.choice([n for n in NUMBERS if not small or n < 2**32])
    changed[place : place + (4 if small else 8)] = struct.pack("<I" if small else "<Q", number)
    if rng.random() < 0.1:
        changed[start] = rng.randrange(256)
    return bytes(changed)


def mutate_numpy_header(content: bytes, rng: random.Random) -> bytes:
    """Return a NumPy file whose header names another shape, dtype or order."""
    length = int.from_bytes(content[8:10], "little")
    header = content[10 : 10 + length].decode("latin1")
    shape = f"'shape': {rng.choice(['()', '(0,)', '(-1,)', '(99999999999,)', '(3, 5)', '(1,)', 'None', '(2.5,)'])}"
    dtype = f"'descr': '{rng.choice(['<f8', '|O', '<i8', '|S5', '>i4', '<U3', '<c16', '|V0', 'x', ''])}'"
    edited = rng.choice(
        [
            re.sub(r"'shape': \([^)]*\)", shape, header),
            re.sub(r"'descr': '[^']*'", dtype, header),
            header.replace("False", rng.choice(["True", "3", "None"])),
            header.replace("descr", "x"),
            "{" * 500,
        ]
    )
    text = edited.encode("latin1")
    return content[:8] + len(text).to_bytes(2, "little") + text + content[10 + length :]


def mutate_tensors(path: Path, rng: random.Random) -> None:
    """Rewrite a file of tensors with one tensor removed, renamed, or of another shape or dtype."""
    tensors: dict[Any, Any] = dict(
        load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    )
    key = rng.choice(sorted(tensors))
    value = tensors.pop(key)
    if not torch.is_tensor(value):
        tensors[key] = rng.choice([None, 3, "x", [value], {"x": value}, 10**12])
        torch.save(tensors, path)
        return
    dense: list[Any] = [
        None,
        value.reshape(-1),
        value.reshape(-1)[:1],
        value.new_zeros(0),
        value.sum(),
        value.to(torch.int8),
        value.to(torch.complex64),
        value.double(),
        value.to(torch.float8_e4m3fn),
        value.bool(),
        value.float() * float("nan"),
    ]
    odd = [value.float().to_sparse(), value.to("meta"), 3, "x", [value], {"x": value}]
    names = [key, key, key, f"{key}x", "", key.replace("0", "999999999")]
    new = rng.choice(dense if path.suffix == ".safetensors" else dense + odd)
    if new is not None:
        tensors[rng.choice(names)] = new
    if path.suffix == ".safetensors":
        save_file({k: v.contiguous().clone() for k, v in tensors.items()}, path)
    else:
        torch.save(
            rng.choice([tensors, tensors, tensors, list(tensors.values()), {1: value}, value]), path
        )


def mutate_file(path: Path, rng: random.Random) -> None:
    """Mutate one file in place, by the structure of its format half of the time or more, and else by its bytes."""
    structured, content = rng.random() < 0.75, path.read_bytes()
    headers: list[tuple[bool, Callable[[bytes, random.Random], bytes]]] = [
        (path.suffix == ".safetensors" and rng.random() < 0.6, mutate_safetensors_header),
        (content[:4] == b"GGUF", mutate_gguf_header),
        (content[:6] == b"\x93NUMPY", mutate_numpy_header),
    ]
    header = next((mutation for fits, mutation in headers if fits), None)
    if structured and path.suffix == ".json":
        path.write_text(mutate_json(content.decode(), rng), "utf-8", "surrogatepass")
    elif structured and path.suffix == ".jsonl":
        lines = content.decode().splitlines()
        number = rng.randrange(len(lines))
        lines[number] = mutate_json(lines[number], rng)
        path.write_text("\n".join(lines), "utf-8", "surrogatepass")
    elif structured and header is not None:
        path.write_bytes(header(content, rng))
    elif structured and (
        path.suffix == ".safetensors" or (content[:2] == b"PK" and path.suffix != ".npz")
    ):
        mutate_tensors(path, rng)
    else:
        path.write_bytes(mutate_bytes(content, rng))


def mutate(folder: Path, rng: random.Random, pattern: str = "*") -> str:
    """Mutate one file of a folder whose name matches a pattern; return its name."""
    path = rng.choice(sorted(p for p in folder.rglob(pattern) if p.is_file()))
    mutate_file(path, rng)
    return path.name
