"""The README's Python runs as it stands there."""

import re
from pathlib import Path

import pytest

from draftree.target import demo_folder

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.skipif(not demo_folder("edd").is_dir(), reason="the demo's weights are not shipped here")
def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    example = re.search(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert example is not None
    exec(example[1], {})
    assert capsys.readouterr().out.strip()
