"""Datastores: what is read of a corpus, what is written of it, for whom it opens, and the command from end to end."""

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftree.costs.step_costs import UNIT_COSTS
from draftree.data.corpus import BATCH, Documents, batches, files, texts
from draftree.drafters.rest import REST
from draftree.drafters.retrieval.datastore_drafter import tokenizer_hash
from draftree.drafters.retrieval.suffix_array import SEPARATOR
from draftree.errors import UserError
from draftree.registry import build, method_of
from draftree.sampling.draft_sampling import Drawing
from draftree.target.target import Target
from draftree.training import datastore
from draftree.tree import Candidates, Ints, Tree, TreeBudget
from folders import TEMPLATE, byte_tokenizer, target_folder

CHAT = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "cd"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(target_folder(tmp_path_factory.mktemp("target")))


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured costs stay inside the test."""
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path_factory.mktemp("cache")))


def documents(path: Path, template: str | None = TEMPLATE) -> tuple[list[str], Documents]:
    """The documents of a path as text, and the reading of them."""
    tokenizer = byte_tokenizer(template)
    reading = Documents(files([path]), tokenizer)
    return [tokenizer.decode(ids) for ids in reading], reading


def stored(folder: Path) -> list[str]:
    """The documents of a datastore for REST as text."""
    tokens = np.load(folder / "tokens.npy")
    assert tokens.dtype == np.uint32
    assert tokens[-1] == SEPARATOR
    parts = np.split(tokens, np.flatnonzero(tokens == SEPARATOR) + 1)
    return [byte_tokenizer().decode(part[:-1]) for part in parts if len(part)]


def corpus(path: Path, kind: str) -> tuple[Path, list[str]]:
    """A corpus of a kind below a folder, and its documents."""
    path.mkdir()
    if kind == "text":
        (path / "a.txt").write_text("one text\nof two lines")
        return path / "a.txt", ["one text\nof two lines"]
    if kind == "jsonl":
        rows = [{"text": "first"}, {"prompt": "se", "completion": "cond"}, {"text": ""}]
        (path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
        return path / "a.jsonl", ["first", "second"]
    if kind == "chat":
        rows = [{"messages": CHAT}, {"question": " q ", "answer": "1+1=<<1+1=2>>2"}]
        (path / "a.json").write_text(json.dumps(rows))
        return path / "a.json", [
            "<|user|>ab<|assistant|>cd<eos>",
            "<|user|>q<|assistant|>1+1=2<eos>",
        ]
    (path / "deep" / "er").mkdir(parents=True)
    (path / ".hidden").mkdir()
    wanted = {
        "deep/er/a.py": "import a",
        "deep/b.rs": "fn b() {}",
        "README.md": "# c",
        "rows.jsonl": '{"text": "d"}',
    }
    others = {
        ".hidden/a.py": "x",
        ".b.py": "x",
        "data.bin": "x",
        "lock.json": "{}",
        "empty.py": "",
        "noname": "x",
    }
    for name, text in (wanted | others).items():
        (path / name).write_text(text)
    (path / "latin.py").write_bytes(b"caf\xe9 = 1")
    (path / "zero.c").write_bytes(b"a\0b")
    return path, ["# c", "fn b() {}", "import a", "d"]


KINDS = ["text", "jsonl", "chat", "source"]


@pytest.mark.parametrize("kind", KINDS)
def test_documents_of_each_file_format_are_read(tmp_path: Path, kind: str) -> None:
    path, want = corpus(tmp_path / "c", kind)
    got, reading = documents(path)
    assert got == want
    assert reading.documents == len(want)
    assert reading.text_bytes == sum(map(len, want))
    assert reading.undecodable == (2 if kind == "source" else 0)


def test_a_file_that_was_named_is_not_left_out(tmp_path: Path) -> None:
    (tmp_path / "latin.py").write_bytes(b"caf\xe9 = 1")
    (tmp_path / "settings.cfg").write_text("named, so read")
    assert documents(tmp_path / "settings.cfg")[0] == ["named, so read"]
    with pytest.raises(UserError, match="is not UTF-8 text"):
        documents(tmp_path / "latin.py")


def test_without_a_template_every_message_is_a_document(tmp_path: Path) -> None:
    path, _ = corpus(tmp_path / "c", "chat")
    assert documents(path, None)[0] == ["ab", "cd", "q", "1+1=2"]


def test_a_chat_that_the_template_refuses_is_named() -> None:
    refusing = byte_tokenizer("{{ raise_exception('no system') }}")
    with pytest.raises(
        UserError, match=r"here: the target's chat template refuses this chat: no system"
    ):
        texts({"messages": CHAT}, "here", refusing)


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud800b"}')
    assert documents(tmp_path / "a.jsonl")[0] == ["a?b"]


def test_progress_counts_the_bytes_of_the_files(tmp_path: Path) -> None:
    path, _ = corpus(tmp_path / "c", "source")
    told: list[int] = []
    found = files([path])
    assert len(list(Documents(found, byte_tokenizer(), told.append))) == 4
    assert told == sorted(told)
    assert told[-1] == sum(f.path.stat().st_size for f in found)


def test_texts_are_tokenised_in_batches() -> None:
    half = "x" * (BATCH // 2)
    assert [len(b) for b in batches([half, half, half, "y", half])] == [2, 3]
    assert list(batches([])) == []


def test_the_hash_is_of_what_decides_ids_alone() -> None:
    hashed = tokenizer_hash(byte_tokenizer())
    assert hashed == tokenizer_hash(byte_tokenizer(None)), "a template decides no ids"
    called = byte_tokenizer()
    called(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert hashed == tokenizer_hash(called)
    added = byte_tokenizer()
    added.add_tokens(["longer"])
    assert hashed != tokenizer_hash(added)


# The command.


@pytest.mark.parametrize("kind", KINDS)
def test_build_show_and_generate(draftree, folder: str, tmp_path: Path, kind: str) -> None:
    path, want = corpus(tmp_path / "c", kind)
    out = tmp_path / "new" / "store"
    status, printed, err = draftree("datastore", "build", "--kind", "rest", "--target", folder, "--data", str(path), "--out",
                                    str(out), "--json")  # fmt: skip
    said = json.loads(printed)
    assert (status, err) == (0, "")
    assert stored(out) == want
    on_disk = ["config.json", "suffixes.npy", "tokens.npy"]
    assert sorted(p.name for p in out.iterdir()) == on_disk
    assert [p.name for p in out.parent.iterdir()] == ["store"]
    size = sum((out / name).stat().st_size for name in on_disk[1:])
    counts = {
        "documents": len(want),
        "text_bytes": sum(map(len, want)),
        "bytes": size,
        "vocab": 260,
        "target": folder,
    }
    assert {k: said[k] for k in counts} == counts
    assert said["tokens"] == len(np.load(out / "tokens.npy")) - len(want)
    assert said["tokenizer"] == tokenizer_hash(byte_tokenizer())
    assert said["undecodable"] == (2 if kind == "source" else 0)

    status, shown, _ = draftree("datastore", "show", str(out), "--json")
    assert (status, {"out": str(out)} | json.loads(shown)) == (0, said)
    _, shown, _ = draftree("datastore", "show", str(out))
    assert f"{said['tokens']:,}" in shown
    assert said["tokenizer"] in shown

    status, written, err = draftree("generate", "ab", "--target", folder, "--drafter", str(out), "--policy", "trie",
                                    "--max-new-tokens", "12", "--baseline", "--json")  # fmt: skip
    assert (status, err) == (0, "")
    assert json.loads(written)["baseline"]["same_output"] is True


def test_several_paths_and_a_line_of_what_was_built(draftree, folder: str, tmp_path: Path) -> None:
    (text, first), (source, second) = (
        corpus(tmp_path / "t", "text"),
        corpus(tmp_path / "s", "source"),
    )
    out = tmp_path / "store"
    out.mkdir()  # an empty folder is as good as none
    status, printed, err = draftree("datastore", "build", "--kind", "rest", "--target", folder, "--data", str(text),
                                    "--data", str(source), "--out", str(out))  # fmt: skip
    assert (status, err) == (0, "")
    assert stored(out) == first + second
    assert "datastore for 'rest', 5 documents, 42 tokens, 42 bytes of text" in printed
    assert "2 files left out that are not UTF-8 text" in printed
    assert method_of(out) == "rest"
    assert build("drafter", str(out)) == REST(datastore=str(out))


@pytest.fixture(scope="module")
def store(folder: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("built")
    path, _ = corpus(home / "c", "text")
    datastore.create_datastore("rest", datastore.CorpusFiles(folder, [path]), home / "store")
    return home / "store"


def other_target(folder: Path) -> Target:
    """A target of the same shape whose tokenizer has one token more."""
    target_folder(folder)
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["longer"])
    tokenizer.save_pretrained(folder)
    return Target.load(str(folder))


def test_another_tokenizer_is_refused_by_name(store: Path, folder: str, tmp_path: Path) -> None:
    other = other_target(tmp_path / "other")
    with pytest.raises(UserError) as refused:
        REST(datastore=str(store)).open(other)
    told = str(refused.value)
    for part in (
        folder,
        other.name,
        tokenizer_hash(other.tokenizer),
        tokenizer_hash(byte_tokenizer()),
        "--kind rest",
    ):
        assert part in told
    assert "\n" not in told


def test_the_same_tokenizer_of_another_target_is_taken(store: Path, tmp_path: Path) -> None:
    same = Target.load(str(target_folder(tmp_path / "same")))
    assert "22 tokens" in REST(datastore=str(store)).open(same).description, "21 and a separator"


def test_files_are_mapped_not_read(store: Path, folder: str) -> None:
    model = REST(datastore=str(store)).open(Target.load(folder))
    for array in (model._corpora[0].tokens, model._corpora[0].suffixes):
        assert isinstance(array.base, np.memmap)


def changed(store: Path, folder: Path, **said: object) -> Path:
    """A copy of a datastore whose note says something else."""
    folder.mkdir()
    for file in store.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["draftree"] |= said
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_unfitting_datastores_are_refused(store: Path, folder: str, tmp_path: Path) -> None:
    target = Target.load(folder)
    wrong = {
        tmp_path / "none": "does not exist",
        changed(
            store, tmp_path / "a", drafter="aded"
        ): "is a datastore for 'aded', needed is one for 'rest'",
        changed(
            store, tmp_path / "b", vocab=300
        ): "token ids up to 299, allowed are those below the vocabulary",
    }
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "config.json").write_text('{"draftree": {"drafter": "edd"}}')
    (changed(store, tmp_path / "d") / "suffixes.npy").write_bytes(b"no array")
    wrong |= {tmp_path / "c": "is not a datastore", tmp_path / "d": "cannot read"}
    np.save(changed(store, tmp_path / "e") / "tokens.npy", np.zeros((2, 2), np.uint32))
    wrong[tmp_path / "e"] = (
        "allowed is a one-dimensional array of integers in this machine's byte order"
    )
    for where, told in wrong.items():
        with pytest.raises(UserError, match=told):
            REST(datastore=str(where)).open(target)


def test_an_interruption_leaves_nothing(
    draftree, folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = corpus(tmp_path / "c", "source")
    made: list[Path] = []

    def interrupted(documents: Iterator[object], vocab: int, home: Path, *_: object) -> None:
        next(iter(documents))
        (home / "tokens.npy").write_bytes(b"half")
        made.append(home)
        raise KeyboardInterrupt

    monkeypatch.setattr(REST, "build", interrupted)
    status, out, err = draftree("datastore", "build", "--kind", "rest", "--target", folder, "--data", str(path), "--out",
                                str(tmp_path / "new" / "store"))  # fmt: skip
    told = "draftree: nothing was written; the same command begins anew\ndraftree: interrupted\n"
    assert (status, out, err) == (130, "", told)
    assert made
    assert made[0] != tmp_path / "new" / "store"
    assert [p.name for p in tmp_path.iterdir()] == ["c"]


MISTAKES = {
    "no command": ([], "known are build, show"),
    "unknown command": (["biuld"], "did you mean 'build'"),
    "unknown kind": (["build", "--kind", "rets"], "unknown kind of datastore 'rets': known are"),
    "no data": (
        ["build", "--kind", "rest", "--data", "nowhere"],
        "data is 'nowhere', but there is no such file or folder",
    ),
    "nothing to read": (
        ["build", "--kind", "rest", "--data", "hollow"],
        "folder 'hollow' has no file to read",
    ),
    "no text": (["build", "--kind", "rest", "--data", "empty.txt"], "the corpus is empty"),
    "no row": (
        ["build", "--kind", "rest", "--data", "row.jsonl"],
        "row.jsonl:1 has the keys a; allowed are",
    ),
    "no target": (
        ["build", "--kind", "rest", "--data", "a.txt", "--target", "./nowhere"],
        "there is no folder or file './nowhere'",
    ),
    "no setting": (
        ["build", "--kind", "rest", "--data", "a.txt", "--set", "order=3"],
        "unknown setting",
    ),
    "no pair": (
        ["build", "--kind", "rest", "--data", "a.txt", "--set", "order"],
        "--set is 'order', allowed is KEY=VALUE",
    ),
    "out is full": (
        ["build", "--kind", "rest", "--data", "a.txt", "--out", "full"],
        "'full' holds files that draftree did not write",
    ),
    "out is a file": (
        ["build", "--kind", "rest", "--data", "a.txt", "--out", "a.txt"],
        "'a.txt' is a file, allowed is a folder",
    ),
    "out in a file": (
        ["build", "--kind", "rest", "--data", "a.txt", "--out", "a.txt/b"],
        "cannot be written",
    ),
    "no datastore": (["show", "nowhere"], "datastore 'nowhere' does not exist"),
    "not a datastore": (["show", "full"], "is not a drafter's config"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_told_in_one_line(
    draftree, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "a.txt": "some text",
        "empty.txt": "",
        "row.jsonl": '{"a": 1}',
        "full/x": "x",
    }.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    Path("hollow").mkdir()
    args, told = MISTAKES[case]
    if args[:1] == ["build"]:
        given = {"--data": "a.txt", "--out": "out"}
        args = [*args, *(item for pair in given.items() if pair[0] not in args for item in pair)]
    before = sorted(tmp_path.rglob("*"))
    status, out, err = draftree("datastore", *args)
    assert (status, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_text_of_the_corpus_is_drafted(store: Path, folder: str) -> None:
    target = Target.load(folder)
    prompt = target.tokenizer("it is one text")["input_ids"]
    model = build("drafter", str(store)).open(target)
    state = model.start([np.array(prompt[:-1])], np.array(prompt[-1:]), None)
    tree = Tree.from_roots(np.array([0]), np.array(prompt[-1:]))

    def expand(tree: Tree, frontier: Ints, k: int) -> Candidates:
        nonlocal state
        candidates, state = model.expand(state, tree, frontier, k, Drawing())
        return candidates

    tree = build("policy", "trie").draft(
        expand, tree, UNIT_COSTS, TreeBudget(np.array([50]), 100), None
    )
    assert target.tokenizer.decode(tree.tokens[1:]) == "\nof two li", "ten tokens"
