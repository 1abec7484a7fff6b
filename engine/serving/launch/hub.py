"""Fetch a checkpoint from the Hugging Face Hub into the cache that all programs share, by its own client."""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# Letters, digits, '_', '-' and '.' with one slash between: what the hub calls a repository.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*")

# Files at the top of a repository that serving reads; weights in other storages stay where they are. Some
# repositories hold the same weights once more as consolidated*.safetensors.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "tiktoken.model")
_UNWANTED = ("*/*", "consolidated*.safetensors")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK = 1 << 20
_READERS = 4
_INSTALL = "pip install 'nereid[hub]' (it brings huggingface_hub)"


class HubError(Exception):
    """A checkpoint cannot be fetched; the message says why and what to do."""


def is_name(text: str) -> bool:
    """Whether `text` is ORG/NAME of the hub: it looks like one and not like a file, and no such path is on this
    machine."""
    return bool(_NAME.fullmatch(text)) and not text.endswith(".gguf") and not Path(text).exists()


def fetch(name: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint in the hub's cache, fetched where it is not there yet.

    revision: a branch, a tag or a commit; the main branch without it. The hub's address, the token, the cache and
    offline mode are those of huggingface_hub's own variables and login. A connection that breaks is taken up where it
    was, some times; a later call fetches only the files that are not whole. Every file is compared with the hash
    that the hub gave. Raises HubError.
    """
    try:
        from huggingface_hub import HfApi, constants, snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            HTTPError,
            LocalEntryNotFoundError,
            OfflineModeIsEnabled,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError:
        raise HubError(f"{name} is no folder here, and to fetch it from the hub needs {_INSTALL}") from None
    hub, at = constants.ENDPOINT, f" at revision {revision}" if revision else ""
    away = ""
    try:
        try:
            held = [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()]
            _check_contents(name + at, held)
        except (OfflineModeIsEnabled, HTTPError) as error:
            if isinstance(error, HfHubHTTPError):
                raise
            away = "offline mode is on" if isinstance(error, OfflineModeIsEnabled) else f"{hub} cannot be reached"
        folder = Path(
            snapshot_download(name, revision=revision, allow_patterns=list(_WANTED), ignore_patterns=list(_UNWANTED))
        )
        _verify(name, folder)
    except GatedRepoError:
        raise HubError(
            f"{name} is gated: accept its terms at {hub}/{name}, and log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name} has no revision {revision}: give a branch, a tag or a commit of {hub}/{name}") from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{hub} has no model {name}, or shows it to nobody without a token: check the name; "
            "for a private one log in with `hf auth login` or set HF_TOKEN"
        ) from None
    except LocalEntryNotFoundError as error:
        why = away or f"{hub} does not give it ({_first_line(error)})"
        raise HubError(
            f"{name}{at} cannot be fetched: {why}, and {constants.HF_HUB_CACHE} does not hold all of it"
        ) from None
    except HfHubHTTPError as error:
        raise HubError(f"{name}{at} cannot be fetched: {hub} answers {_first_line(error)}") from None
    except HTTPError as error:
        raise HubError(
            f"the download of {name} broke off ({_first_line(error)}): run the command again; "
            "files that are whole are kept"
        ) from None
    except OSError as error:
        if error.errno in _FULL:
            raise HubError(
                f"{name} does not fit on the disk of {constants.HF_HUB_CACHE} ({error.strerror}): make room there, "
                "or set HF_HOME to a larger one, and run the command again; files that are whole are kept"
            ) from None
        raise HubError(f"{name}{at} cannot be fetched: {_first_line(error)}") from None
    except ValueError as error:
        raise HubError(f"{name}{at} cannot be fetched: {_first_line(error)}") from None
    except (AttributeError, KeyError, TypeError):  # huggingface_hub takes what came for what a hub says
        raise HubError(
            f"{name}{at} cannot be fetched: {hub} answers otherwise than a hub does: is a proxy in between, or "
            "HF_ENDPOINT the address of something else?"
        ) from None
    return folder


def _check_contents(name: str, files: list[str]) -> None:
    """Raise HubError before the download where nothing that can be served would come."""
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    if "config.json" in files and weights:
        return
    others = sorted({Path(file).suffix for file in files if file.endswith((".gguf", ".bin", ".pt", ".pth"))})
    held = f" (it has {', '.join(others)})" if others else ""
    lacks = "config.json" if weights else "*.safetensors"
    raise HubError(f"{name} holds no {lacks}{held}: give a repository of safetensors with a config.json")


def _verify(name: str, folder: Path) -> None:
    """Compare every file with the hash that its blob in the cache is named by: SHA-256 of large files, else git's.

    Raises HubError, and the file is then no longer in the cache.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(_digest, files := sorted(_linked(folder))))
    broken = [file for file, digest in zip(files, found, strict=True) if digest != Path(os.readlink(file)).name]
    for file in broken:
        link = file
        while link.is_symlink():
            target = link.parent / os.readlink(link)
            link.unlink()
            link = target
        link.unlink(missing_ok=True)
    if broken:
        raise HubError(
            f"{', '.join(file.name for file in broken)} of {name} arrived with another hash than the hub says, "
            "and is removed: run the command again"
        )


def _linked(folder: Path) -> Iterator[Path]:
    """Files whose blob is named by a hash: 64 hexadecimal digits or 40."""
    for file in folder.iterdir():
        if file.is_symlink() and re.fullmatch(r"[0-9a-f]{40}([0-9a-f]{24})?", Path(os.readlink(file)).name):
            yield file


def _digest(file: Path) -> str:
    if len(Path(os.readlink(file)).name) == 64:
        digest = hashlib.sha256()
    else:
        digest = hashlib.sha1(b"blob %d\0" % file.stat().st_size, usedforsecurity=False)
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
