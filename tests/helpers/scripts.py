"""Run scripts of benchmarks inside the process of the tests."""

from importlib import import_module

import pytest


def run_script(name: str, *args: object) -> int:
    """Run a script of benchmarks that ends the program, and return its exit status."""
    with pytest.raises(SystemExit) as ended:
        import_module(name).main([str(a) for a in args])
    return int(ended.value.code or 0)
