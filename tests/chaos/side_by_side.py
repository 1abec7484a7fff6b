"""Storms of several seeds side by side, for a machine of many cores: each fleet has cores, ports, processes and shared
memory of its own.

python -m tests.chaos.side_by_side --seed 5000 --fleets 10 --cores 3 --minutes 30 [--keep FOLDER]

Fleets run in namespaces (`unshare` of util-linux, as root). The seeds of two fleets are 100 apart, for a fleet takes
those behind its first one, a storm each. Prints what each fleet printed of storms that broke a promise, and a table.
Exits with 1 when one did, or when a fleet ended before its time.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import re
import socket
import struct
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

_APART = 100
_SHOWN = 2000  # characters of a storm that broke a promise
# ioctl(2) of a network device: its flags, of which this is up and running (netdevice(7)).
_SET_FLAGS, _UP = 0x8914, 0x1 | 0x40


@dataclass(frozen=True)
class Outcome:
    """What a fleet printed, and how it ended."""

    seed: int
    status: int
    text: str

    @property
    def storms(self) -> list[str]:
        """Each with its schedule first."""
        return re.split(r"^(?=seed \d)", self.text, flags=re.M)[1:]

    @property
    def broken(self) -> list[str]:
        return [storm for storm in self.storms if "\n  BROKEN " in storm]

    def count(self, pattern: str) -> int:
        """The sum of the numbers that `pattern` finds."""
        return sum(int(number) for number in re.findall(pattern, self.text))


def started(number: int, given: argparse.Namespace, folder: Path) -> tuple[int, Path, subprocess.Popen[bytes]]:
    """The seed of fleet `number`, its log, and its process."""
    seed, log = given.seed + _APART * number, folder / f"{number}.log"
    cores = f"{number * given.cores}-{(number + 1) * given.cores - 1}"
    keep = [] if given.keep is None else ["--keep", str(given.keep / str(seed))]
    inside = [sys.executable, "-m", "tests.chaos.side_by_side", "--inside", "--seed", seed, "--minutes", given.minutes]
    # A shell is the first process: it ends those that lose their parent.
    apart = ["unshare", "--net", "--pid", "--fork", "--mount", "--mount-proc", "sh", "-c", '"$@"; exit $?', "sh"]
    words = ["taskset", "--cpu-list", cores, *apart, *map(str, inside), *keep]
    with log.open("wb") as out:
        return seed, log, subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=out, stderr=out)


def inside(words: list[str]) -> None:
    """Becomes `tests.chaos`, in namespaces that were made for it."""
    with socket.socket() as device:
        fcntl.ioctl(device, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
    own = tempfile.mkdtemp(prefix="nc-")
    for folder in ("/dev/shm", own):
        if ctypes.CDLL(None, use_errno=True).mount(b"tmpfs", os.fsencode(folder), b"tmpfs", 0, None) != 0:
            raise OSError(ctypes.get_errno(), f"a file system of memory cannot be put on {folder}")
    os.environ["TMPDIR"] = own
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # engines of all fleets would share the first GPU
    os.execv(sys.executable, [sys.executable, "-m", "tests.chaos", "--no-shrink", *words])


def told(outcomes: list[Outcome], console: Console) -> None:
    table = Table("seed", "storms", "answered whole", "tritonserver aborted", "broken", "exit status")
    for one in outcomes:
        for storm in one.broken:
            console.print(storm[:_SHOWN], markup=False, highlight=False, soft_wrap=True)
        if not one.storms:
            console.print(one.text[-_SHOWN:], markup=False, highlight=False, soft_wrap=True)
        counts = (len(one.storms), one.count(r"(\d+) ok"), one.count(r"aborted (\d+) times"), len(one.broken))
        table.add_row(str(one.seed), *map(str, counts), str(one.status))
    console.print(table)


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, required=True, help="of the first storm of the first fleet")
    parser.add_argument("--fleets", type=int, default=len(os.sched_getaffinity(0)) // 3)
    parser.add_argument("--cores", type=int, default=3, help="of each fleet")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--keep", type=Path, help="a folder for the logs of fleets that broke a promise")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    if given.inside:
        keep = [] if given.keep is None else ["--keep", str(given.keep)]
        inside(["--seed", str(given.seed), "--minutes", str(given.minutes), *keep])
    if not 0 < given.fleets * given.cores <= len(os.sched_getaffinity(0)):
        parser.error(f"{given.fleets} fleets of {given.cores} cores do not fit {len(os.sched_getaffinity(0))} cores")
    with tempfile.TemporaryDirectory(prefix="nc-") as folder:
        running = [started(number, given, Path(folder)) for number in range(given.fleets)]
        outcomes = [Outcome(seed, process.wait(), log.read_text(errors="replace")) for seed, log, process in running]
    told(outcomes, Console(width=120))
    return 0 if all(one.status == 0 and one.storms for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
