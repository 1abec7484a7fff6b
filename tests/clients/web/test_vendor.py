"""Libraries of the page are the published files, with their licences.

python -m tests.clients.web.vendor fetches the packages and compares every byte.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

VENDOR = Path(__file__).parents[3] / "clients" / "web" / "vendor"
PACKAGES = json.loads((VENDOR / "manifest.json").read_text())["packages"]


def test_the_files_are_those_of_the_manifest() -> None:
    listed = {name: file["sha256"] for package in PACKAGES for name, file in package["files"].items()}
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in VENDOR.iterdir()}
    del found["manifest.json"]
    assert found == listed


def test_every_package_has_its_licence_and_the_hash_of_what_was_published() -> None:
    for package in PACKAGES:
        assert any(name.endswith(".LICENSE") for name in package["files"]), package["name"]
        assert package["integrity"].startswith("sha512-"), package["name"]
        assert package["license"], package["name"]
        assert package["version"], package["name"]
