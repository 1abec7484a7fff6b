"""Fetch a checkpoint from the Hugging Face Hub into the cache that all programs share, by its own client."""

from __future__ import annotations

import errno
import fnmatch
import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from engine.types import shown

# Letters, digits, '_', '-' and '.' with one slash between: what the hub calls a repository. Behind a colon, which of
# its GGUF models.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*/[A-Za-z0-9_][A-Za-z0-9_.-]*(:[A-Za-z0-9_.-]+)?")

# Files at the top of a repository that serving reads; weights in other storages stay where they are. Some
# repositories hold the same weights once more as consolidated*.safetensors.
_WANTED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "*.tiktoken", "tiktoken.model")
_UNWANTED = ("*/*", "consolidated*.safetensors")
# What stands in a folder and is read.
_TEMPLATES = "additional_chat_templates/*.jinja"
# What stands behind a model's name where it is stored in several files, and what pictures are seen with.
_PART = re.compile(r"-\d{5}-of-\d{5}$")
_NO_MODEL = "mmproj"

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_CHUNK = 1 << 20
_READERS = 4
_INSTALL = "pip install 'nereid[hub]' (it brings huggingface_hub)"


class HubError(Exception):
    """A checkpoint cannot be fetched; the message says why and what to do."""


def is_name(text: str) -> bool:
    """Whether `text` is ORG/NAME or ORG/NAME:WHICH of the hub: it looks like one and not like a file, and no such path
    is on this machine."""
    return bool(_NAME.fullmatch(text)) and not text.endswith(".gguf") and not Path(text).exists()


def fetch(text: str, revision: str | None = None) -> Path:
    """The folder of a checkpoint in the hub's cache, fetched where it is not there yet; of ORG/NAME:WHICH the GGUF
    file, or the first of several, that is called so or whose name ends so.

    revision: a branch, a tag or a commit; the main branch without it. The hub's address, the token, the cache and
    offline mode are those of huggingface_hub's own variables and login. A connection that breaks is taken up where it
    was, some times; a later call fetches only the files that are not whole. Every file is compared with the hash
    that the hub gave. Raises HubError.
    """
    name, _, which = text.partition(":")
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HTTPError, OfflineModeIsEnabled
    except ImportError:
        raise HubError(f"{name} is no folder here, and to fetch it from the hub needs {_INSTALL}") from None
    at = f" at revision {revision}" if revision else ""
    away: Exception | None = None
    model: list[str] | None = None
    wanted = list(_WANTED)
    unwanted: list[str] | None = list(_UNWANTED)
    if which:
        wanted, unwanted = [f"*{which}.gguf", f"*{which}-*-of-*.gguf"], [f"*{_NO_MODEL}*"]
    try:
        try:
            held = [file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or ()]
            if which:
                wanted = model = _gguf_model(name + at, held, which)
            else:
                _check_contents(name + at, held)
                # Listed, for what is not wanted goes before what is.
                wanted, unwanted = [file for file in held if _is_wanted(file)], None
        except (OfflineModeIsEnabled, HTTPError) as error:
            if isinstance(error, HfHubHTTPError):
                raise
            away = error
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=unwanted))
        if which:
            here = [str(file.relative_to(folder)) for file in folder.rglob("*.gguf")]
            files = [folder / file for file in model or _gguf_model(name + at, here, which)]
        else:
            files = [*folder.iterdir(), *folder.glob(_TEMPLATES)]
        _verify(name, files)
    # huggingface_hub takes what came for what a hub says: the last three are of that.
    except (HTTPError, OSError, ValueError, AttributeError, KeyError, TypeError) as error:
        raise HubError(_sentence(error, name, revision, away)) from None
    return files[0] if which else folder


def _sentence(error: Exception, name: str, revision: str | None, away: Exception | None) -> str:
    """Why a checkpoint could not be fetched, and what to do. away: why the hub was not asked, where it was not."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HTTPError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, at = constants.ENDPOINT, f" at revision {revision}" if revision else ""
    if isinstance(error, GatedRepoError):
        return f"{name} is gated: accept its terms at {hub}/{name}, and log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return f"{name} has no revision {revision}: give a branch, a tag or a commit of {hub}/{name}"
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"{hub} has no model {name}, or shows it to nobody without a token: check the name; "
            "for a private one log in with `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, LocalEntryNotFoundError):
        why = f"{hub} does not give it ({_first_line(error)})"
        if away is not None:
            why = "offline mode is on" if isinstance(away, OfflineModeIsEnabled) else f"{hub} cannot be reached"
        return f"{name}{at} cannot be fetched: {why}, and {constants.HF_HUB_CACHE} does not hold all of it"
    if isinstance(error, HTTPError) and not isinstance(error, HfHubHTTPError):
        return (
            f"the download of {name} broke off ({_first_line(error)}): run the command again; "
            "files that are whole are kept"
        )
    if isinstance(error, OSError) and error.errno in _FULL:
        return (
            f"{name} does not fit on the disk of {constants.HF_HUB_CACHE} ({error.strerror}): make room there, "
            "or set HF_HOME to a larger one, and run the command again; files that are whole are kept"
        )
    if isinstance(error, AttributeError | KeyError | TypeError):
        return (
            f"{name}{at} cannot be fetched: {hub} answers otherwise than a hub does: is a proxy in between, or "
            "HF_ENDPOINT the address of something else?"
        )
    answers = f"{hub} answers " if isinstance(error, HfHubHTTPError) else ""
    return f"{name}{at} cannot be fetched: {answers}{_first_line(error)}"


def _gguf_model(name: str, files: list[str], which: str) -> list[str]:
    """The files of the one GGUF model that is called `which` or whose name ends so. Raises HubError for none and for
    several."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        if file.endswith(".gguf") and _NO_MODEL not in file.lower():
            models.setdefault(_PART.sub("", file.removesuffix(".gguf")), []).append(file)
    asked = _PART.sub("", which.lower().removesuffix(".gguf"))
    end = re.compile(rf"(?:.*[-._])?{re.escape(asked)}")
    found = [model for model in models if end.fullmatch(model.rpartition("/")[2].lower())]
    if len(found) == 1:
        return models[found[0]]
    among = shown(", ".join(found or models), 300)
    raise HubError(
        f"{name} holds {'several GGUF models' if found else 'no GGUF model'} whose name ends in {which}"
        + (f"; there is {among}" if among else "")
    )


def _is_wanted(file: str) -> bool:
    if any(fnmatch.fnmatchcase(file, pattern) for pattern in _UNWANTED):
        return fnmatch.fnmatchcase(file, _TEMPLATES)
    return any(fnmatch.fnmatchcase(file, pattern) for pattern in _WANTED)


def _check_contents(name: str, files: list[str]) -> None:
    """Raise HubError before the download where nothing that can be served would come."""
    weights = [
        file
        for file in files
        if file.endswith(".safetensors") and "/" not in file and not file.startswith("consolidated")
    ]
    if "config.json" in files and weights:
        return
    others = sorted({Path(file).suffix for file in files if file.endswith((".gguf", ".bin", ".pt", ".pth"))})
    held = f" (it has {', '.join(others)})" if others else ""
    lacks = "config.json" if weights else "*.safetensors"
    way = f", or one of its GGUF models as {name.split()[0]}:Q4_K_M" if ".gguf" in others else ""
    raise HubError(f"{name} holds no {lacks}{held}: give a repository of safetensors with a config.json{way}")


def _verify(name: str, files: list[Path]) -> None:
    """Compare every file with the hash that its blob in the cache is named by: SHA-256 of large files, else git's.

    Raises HubError, and the file is then no longer in the cache.
    """
    with ThreadPoolExecutor(_READERS) as readers:
        found = list(readers.map(_digest, files := sorted(_linked(files))))
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


def _linked(files: list[Path]) -> Iterator[Path]:
    """Files whose blob is named by a hash: 64 hexadecimal digits or 40."""
    for file in files:
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
