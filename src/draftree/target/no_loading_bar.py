"""Hide transformers' progress bar while weights are loaded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.utils.logging import set_tqdm_hook


def _hide(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return factory(*args, **options | {"disable": True})


@contextmanager
def no_loading_bar() -> Iterator[None]:
    """Hide transformers' progress bar "Loading weights"; bars of downloads stay visible.

    The previous hook is restored at the end. If another thread has already hidden the bar, that
    thread restores the hook.
    """
    before = set_tqdm_hook(_hide)
    try:
        yield
    finally:
        if before is not _hide:
            set_tqdm_hook(before)
