"""Hide transformers' progress bar while weights are loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook


def _hide(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return factory(*args, **options | {"disable": True})


@contextmanager
def no_loading_bar() -> Iterator[None]:
    """Hide transformers' bar "Loading weights"; bars of downloads stay.

    The hook that was set before is set again at the end. A thread that finds the hook set by
    another one leaves it to that one.
    """
    before = set_tqdm_hook(_hide)
    try:
        yield
    finally:
        if before is not _hide:
            set_tqdm_hook(before)
