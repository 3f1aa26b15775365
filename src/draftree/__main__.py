"""Entry point of `python -m draftree` and of the command `draftree`."""

import os
import signal
from typing import Any, NoReturn


def end(number: int, _: Any) -> NoReturn:
    """Handle a signal: write a message to stderr, and exit with status 128 + `number`.

    No cleanup runs, so the handler is safe while modules are imported and while Python exits.

    Args:
        number: number of the signal.
    """
    os.write(2, b"draftree: interrupted\n")
    os._exit(128 + number)


def main() -> NoReturn:
    """Run the command line, which handles signals itself from its start to its end."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, end)
    from draftree.cli.app import main as run

    run()


if __name__ == "__main__":
    main()
