"""Model names on the Hugging Face hub: check, download, and find in the cache."""

import os
import re
import socket
import threading
import time
from os.path import exists  # accepts names that are too long
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from huggingface_hub import constants

from draftree.errors import format_value
from draftree.utils.files import as_user_error

HUB_ID = re.compile(
    r"(?=.{1,96}$)(?!.*(--|\.\.|\.git$))[A-Za-z0-9]([\w.-]*\w)?(/[A-Za-z0-9]([\w.-]*\w)?)?",
    re.ASCII,
)
"""The form of a hub id, at most 96 characters: OWNER/NAME, or only a name for the oldest models."""
CONNECT_TIMEOUT_SECONDS = 2.0
"""Seconds within which the hub must accept a connection."""
REACHABILITY_TTL_SECONDS = 60.0
"""Seconds for which the result of a connection test is reused."""
DOWNLOADED_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.txt", "*.jinja"]
"""Patterns of the files that are downloaded: configs, weights and tokenizers."""
REVISION_SEPARATOR = "@"
"""Separates a hub id from the requested revision, which is a branch, a tag or a commit."""
_asked: dict[str, tuple[float, bool]] = {}


def is_hub_id(name: str) -> bool:
    """Return whether a name has the form OWNER/NAME of a hub id and is not a local path."""
    return (
        "/" in name
        and HUB_ID.fullmatch(name.partition(REVISION_SEPARATOR)[0]) is not None
        and not exists(name)
    )


def check_path(name: str) -> None:
    """Refuse a name that is neither an existing path nor a possible hub id.

    Raises:
        FileNotFoundError: the path does not exist.
    """
    if exists(name) or (
        HUB_ID.fullmatch(name) and not name.endswith((".gguf", ".safetensors", ".bin", ".json"))
    ):
        return
    raise FileNotFoundError(
        f"there is no folder or file {format_value(name)}, and it is no hub id (OWNER/NAME)"
    )


def is_hub_reachable() -> bool:
    """Return whether the hub, or the configured proxy, accepts a connection.

    The attempt ends after `CONNECT_TIMEOUT_SECONDS`.
    """
    if constants.HF_HUB_OFFLINE:
        return False
    endpoint = os.environ.get("HF_ENDPOINT", constants.ENDPOINT)
    proxies = getproxies()
    url = urlsplit(proxies.get(urlsplit(endpoint).scheme) or proxies.get("all") or endpoint)
    host, port = url.hostname or "", url.port or (80 if url.scheme == "http" else 443)
    when, answered = _asked.get(host, (-REACHABILITY_TTL_SECONDS, False))
    if time.monotonic() - when < REACHABILITY_TTL_SECONDS:
        return answered
    found: list[bool] = []

    def connect() -> None:  # in a thread, as name lookup has no time limit
        try:
            socket.create_connection((host, port), CONNECT_TIMEOUT_SECONDS).close()
            found.append(True)
        except OSError:
            found.append(False)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(CONNECT_TIMEOUT_SECONDS)
    _asked[host] = time.monotonic(), found == [True]
    return found == [True]


def find_in_cache(name: str, revision: str | None = None, file: str = "config.json") -> Path | None:
    """Return the folder of a repository in the hub's cache, or None if the cache lacks it."""
    from huggingface_hub import (
        try_to_load_from_cache,
    )  # it takes seconds, and the command line's checks seldom need it

    config = try_to_load_from_cache(name, file, revision=revision)
    return Path(config).parent if isinstance(config, str) else None


def locate_model(name: str, revision: str | None = None, file: str = "config.json") -> str:
    """Return the place from which a model is loaded.

    It is the name itself, or the folder in the hub's cache if the hub cannot be reached.

    Args:
        name: a path or a hub id.
        revision: a branch, a tag or a commit.
        file: a file that the cached copy must contain.

    Raises:
        FileNotFoundError: the path does not exist, or the hub cannot be reached and its cache has
            no copy.
    """
    check_path(name)
    if exists(name) or is_hub_reachable():
        return name
    if (folder := find_in_cache(name, revision, file)) is None:
        why = (
            "HF_HUB_OFFLINE is set"
            if constants.HF_HUB_OFFLINE
            else "the Hugging Face hub cannot be reached"
        )
        raise FileNotFoundError(
            f"there is no folder '{name}' here, {why}, and its cache holds no copy; "
            f"`hf download {name}` where there is a network fills it"
        )
    return str(folder)


def download_model(name: str) -> Path:
    """Return the folder of a hub repository, and download it to the hub's cache if needed.

    An interrupted download is continued.

    Args:
        name: a hub id, or OWNER/NAME@REVISION.

    Raises:
        UserError: it cannot be downloaded.
    """
    from huggingface_hub import snapshot_download

    repository, _, revision = name.partition(REVISION_SEPARATOR)
    with as_user_error(f"'{name}' cannot be downloaded"):
        place = locate_model(repository, revision or None)
        if Path(place).is_dir():
            return Path(place)
        return Path(
            snapshot_download(
                repository, revision=revision or None, allow_patterns=DOWNLOADED_FILES
            )
        )
