"""Compare clients/web/vendor with the published packages, or take newer ones.

python -m tests.clients.web.vendor                        # every byte, from the npm registry; needs npm
python -m tests.clients.web.vendor dompurify@3.4.18       # take this version, and write the manifest
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

VENDOR = Path(__file__).parents[3] / "clients" / "web" / "vendor"


def published(name: str, version: str) -> tuple[str, dict[str, bytes]]:
    """The integrity string and the files of a package."""
    with tempfile.TemporaryDirectory() as folder:
        packed = subprocess.run(
            ["npm", "pack", f"{name}@{version}", "--pack-destination", folder, "--silent"],
            check=True,
            capture_output=True,
            text=True,
        )
        archive = Path(folder) / packed.stdout.strip().splitlines()[-1]
        digest = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
        with tarfile.open(archive) as tar:
            files = {member.name: tar.extractfile(member) for member in tar if member.isfile()}
            return f"sha512-{digest}", {n.removeprefix("package/"): f.read() for n, f in files.items() if f}


def check(package: dict[str, Any]) -> list[str]:
    """What differs, as sentences."""
    integrity, files = published(package["name"], package["version"])
    wrong = [] if integrity == package["integrity"] else [f"{package['name']}: the package has another hash."]
    for name, file in package["files"].items():
        if files.get(file["from"]) != (VENDOR / name).read_bytes():
            wrong.append(f"{name} differs from {file['from']} of {package['name']} {package['version']}.")
    return wrong


def take(package: dict[str, Any], version: str) -> None:
    package["integrity"], files = published(package["name"], version)
    package["version"] = version
    for name, file in package["files"].items():
        (VENDOR / name).write_bytes(files[file["from"]])
        file["sha256"] = hashlib.sha256(files[file["from"]]).hexdigest()


def main() -> int:
    manifest = json.loads((VENDOR / "manifest.json").read_text())
    packages = {package["name"]: package for package in manifest["packages"]}
    for wanted in sys.argv[1:]:
        name, _, version = wanted.rpartition("@")
        take(packages[name], version)
    (VENDOR / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
    wrong = [sentence for package in packages.values() for sentence in check(package)]
    print("\n".join(wrong or [f"{len(packages)} packages are as published."]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
