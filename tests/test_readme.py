"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import pytest

from draftree.demo import demo_folder

README = Path(__file__).parents[1] / "README.md"


EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.skipif(not demo_folder("edd").is_dir(), reason="the demo's weights are not shipped here")
@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_runs(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    exec(example, {})


def test_there_are_examples() -> None:
    assert len(EXAMPLES) == 2
