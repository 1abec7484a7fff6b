"""Installs the Debian packages that some tests need, where that can be done: root, apt-get and a network.

    python3 tests/packages.py [--required] COMMAND=PACKAGE...

COMMAND is what the package is there for; what is on PATH already is left alone. What cannot be had is said in a
sentence and its tests are skipped with it; --required makes that an error instead. Run by make; needs nothing but a
Python.
"""

import os
import shutil
import subprocess
import sys

POLICY = "/usr/sbin/policy-rc.d"  # asked by packages before they start a service
ENVIRONMENT = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
PATIENCE = ["-o", "Acquire::Retries=1", "-o", "Acquire::http::Timeout=20", "-o", "DPkg::Lock::Timeout=60"]
LONGEST_S = 400


def main(arguments):
    required = "--required" in arguments
    wanted = dict(argument.split("=") for argument in arguments if argument != "--required")
    missing = {command: package for command, package in wanted.items() if shutil.which(command) is None}
    if not missing:
        return 0
    why = _install(sorted(set(missing.values())))
    missing = [command for command in sorted(missing) if shutil.which(command) is None]
    if not missing:
        return 0
    told = "not installed: {}: {}".format(", ".join(missing), why)
    print(told if required else told + "; the tests that need them are skipped", flush=True)
    return 1 if required else 0


def _install(packages):
    """Why it did not work; empty when it did."""
    by_hand = "apt-get install " + " ".join(packages)
    if shutil.which("apt-get") is None:
        return "this is not Debian or Ubuntu"
    if os.geteuid() != 0:
        return f"only root can ({by_hand})"
    print("installing " + ", ".join(packages), flush=True)
    services_stay_off = not os.path.exists(POLICY)
    if services_stay_off:
        with open(POLICY, "w") as file:
            file.write("#!/bin/sh\nexit 101\n")
        os.chmod(POLICY, 0o755)
    try:
        for command in (["update"], ["install", "--yes", "--no-install-recommends", *packages]):
            ended = subprocess.run(
                ["apt-get", "-qq", *PATIENCE, *command],
                env=ENVIRONMENT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=LONGEST_S,
                check=False,
            )
            if ended.returncode != 0:
                lines = ended.stdout.decode(errors="replace").strip().splitlines() or ["no word"]
                return f"apt-get {command[0]} failed: {lines[-1]}"
    except subprocess.TimeoutExpired:
        return f"apt-get took longer than {LONGEST_S} s"
    finally:
        if services_stay_off:
            os.remove(POLICY)
    return ""


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
