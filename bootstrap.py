"""Set up `.venv` with everything that `make` needs. Run by make; needs nothing but a Python.

    python3 bootstrap.py run|dev [--venv .venv]

run: what serving needs. dev: that and what the tests need.

- The interpreter: this one, or another Python 3.10 to 3.12 on PATH, or one from uv, or 3.13 with a C compiler
  (numpy 1.26, which the embedded server's Python stub needs, has no ready-made package for 3.13).
- The environment: `venv` without its pip, so Debian's python3-venv package is not needed; pip comes from ensurepip,
  else from the package index.
- torch: what the configured index gives, unless that is the CUDA build (several GB) and the machine has no NVIDIA
  GPU; then it comes from PyTorch's own CPU index.
- libpython, which the server needs and Debian's python3 leaves out, out of the distribution's package.
- nvidia-pytriton is installed without its dependencies: only the server inside it is used, and one dependency of its
  Python API has no packages for Python 3.12 and later.

Done once for each state of pyproject.toml.
"""

import argparse
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile

ROOT = os.path.dirname(os.path.abspath(__file__))
TORCH = "torch==2.13.0"
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
SERVER = "nvidia-pytriton==0.7.0"
EXTRAS = {"run": "engine,client,openai,hub", "dev": "dev"}
READY_MADE = ((3, 12), (3, 11), (3, 10))


def main():
    parser = argparse.ArgumentParser(description="Set up the virtual environment that make uses.")
    parser.add_argument("purpose", choices=sorted(EXTRAS), help="run: to serve; dev: to test as well")
    parser.add_argument("--venv", default=os.path.join(ROOT, ".venv"))
    args = parser.parse_args()
    venv = os.path.abspath(args.venv)
    stamps = {purpose: os.path.join(venv, f"nereid-{purpose}-{_digest()}.ready") for purpose in EXTRAS}
    if os.path.isfile(stamps[args.purpose]) or os.path.isfile(stamps["dev"]):
        return
    python = os.path.join(venv, "bin", "python")
    if not _works(python):
        _make_environment(venv)
    if subprocess.call([python, "-m", "pip", "--version"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) != 0:
        _add_pip(python)
    _say(f"installing packages into {venv}; this takes a few minutes")
    quiet = [] if sys.stdout.isatty() else ["--quiet"]  # at a terminal pip shows how far each download is
    os.environ["PYTHONWARNINGS"] = "ignore"  # setuptools' remarks on editable installation
    pip = [python, "-m", "pip", "install", *quiet, "--disable-pip-version-check"]
    steps = (
        ("pip", ["--upgrade", "pip"]),
        (TORCH, [TORCH, *_torch_source(python)]),
        (f"Nereid and what it needs ({EXTRAS[args.purpose]})", ["--editable", f"{ROOT}[{EXTRAS[args.purpose]}]"]),
        (f"{SERVER}, which brings tritonserver", ["--no-deps", SERVER]),
    )
    for number, (what, words) in enumerate(steps, 1):
        _say(f"{number} of {len(steps)}: {what}")
        _run([*pip, *words])
    _add_libpython(python, venv)
    with open(stamps[args.purpose], "w"):
        pass
    _say("ready")


def _digest():
    digest = hashlib.sha256()
    for name in ("pyproject.toml", "bootstrap.py"):
        with open(os.path.join(ROOT, name), "rb") as file:
            digest.update(file.read())
    return digest.hexdigest()[:12]


def _make_environment(venv):
    if os.path.isdir(venv):
        shutil.rmtree(venv)
    python = _interpreter()
    if python is None:
        _say(f"making {venv} with uv's Python 3.12")
        _run(["uv", "venv", "--quiet", "--seed", "--python", "3.12", venv])
        return
    _say(f"making {venv} with {python}")
    _run([python, "-m", "venv", "--without-pip", venv])


def _interpreter():
    """The Python to use, or None for one from uv. Ends the program when there is neither."""
    if sys.version_info[:2] in READY_MADE:
        return sys.executable
    for version in READY_MADE:
        found = shutil.which("python{}.{}".format(*version))
        if found and _works(found):
            return found
    if shutil.which("uv"):
        return None
    newest = sys.executable if sys.version_info[:2] == (3, 13) else shutil.which("python3.13")
    if newest and shutil.which("cc"):
        _say("building numpy 1.26 for Python 3.13 from source, which takes a few minutes")
        return newest
    sys.exit(
        f"Nereid runs on Python 3.10 to 3.13; this is {sys.version_info[0]}.{sys.version_info[1]}. Install 3.10, 3.11 "
        "or 3.12 (apt install python3.11), or uv (https://docs.astral.sh/uv), or for Python 3.13 a C compiler "
        "(apt install gcc python3-dev), and run make again."
    )


def _works(python):
    try:
        return subprocess.call([python, "-c", "import venv"], stderr=subprocess.DEVNULL) == 0
    except OSError:
        return False


def _add_pip(python):
    quiet = subprocess.DEVNULL
    if subprocess.call([python, "-m", "ensurepip"], stdout=quiet, stderr=quiet) == 0:
        return
    _say("fetching pip")
    folder = tempfile.mkdtemp()
    try:
        wheel = _download_pip(folder)
        _run([python, os.path.join(wheel, "pip"), "install", "--quiet", "--no-deps", wheel])
    finally:
        shutil.rmtree(folder)


def _download_pip(folder):
    """Path of pip's newest wheel, fetched from the package index; a wheel can be run as it is."""
    from urllib.parse import urljoin
    from urllib.request import Request, urlopen

    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple").rstrip("/") + "/pip/"
    with urlopen(Request(index, headers={"Accept": "text/html"})) as page:
        links = re.findall(r'href="([^"]+?/(pip-(\d+)\.(\d+)[\d.]*-py3-none-any\.whl)[^"]*)"', page.read().decode())
    if not links:
        sys.exit(f"pip is missing and {index} offers none: install the package python3-venv and run make again.")
    link, name, _, _ = max(links, key=lambda found: (int(found[2]), int(found[3]), found[1]))
    path = os.path.join(folder, name)
    with urlopen(urljoin(index, link)) as source, open(path, "wb") as target:
        shutil.copyfileobj(source, target)
    return path


def _add_libpython(python, venv):
    """Put libpython into `venv`/lib when the machine has none: the server's Python backend is linked to it, and
    Debian's python3 comes without. It is taken out of the distribution's package, which is not installed."""
    ask = "import sys; print('%d.%d' % sys.version_info[:2])"
    version = subprocess.check_output([python, "-c", ask]).decode().strip()
    if version == "3.13":
        return  # the wheel brings this one
    name = f"libpython{version}.so.1.0"
    probe = (
        "import ctypes, os, sys, sysconfig\n"
        f"folders = [sysconfig.get_config_var('LIBDIR') or '', os.path.join({venv!r}, 'lib')]\n"
        f"found = any(os.path.isfile(os.path.join(folder, {name!r})) for folder in folders)\n"
        f"found or ctypes.CDLL({name!r})"
    )
    if subprocess.call([python, "-c", probe], stderr=subprocess.DEVNULL) == 0:
        return
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        _say(f"note: {name} is missing and the server needs it; install the package that holds it")
        return
    _say(f"fetching {name}")
    folder = tempfile.mkdtemp()
    try:
        for package in (f"libpython{version}", f"libpython{version}t64"):
            if _fetch_package(package, folder):
                break
        else:
            _say(f"note: {name} could not be fetched and the server needs it: apt install libpython{version}")
            return
        for root, _, files in os.walk(folder):
            if name in files:
                shutil.copy(os.path.realpath(os.path.join(root, name)), os.path.join(venv, "lib", name))
    finally:
        shutil.rmtree(folder)


def _fetch_package(package, folder):
    """Unpack a package of the distribution into `folder`. Works for any user: apt's lists go to `folder` too if the
    machine's own are missing or old."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "cwd": folder}
    lists = os.path.join(folder, "lists")
    own = ["-o", f"Dir::State::lists={lists}", "-o", f"Dir::Cache={folder}", "-o", "APT::Sandbox::User=root"]
    if subprocess.call(["apt-get", "download", package], **quiet) != 0:
        os.makedirs(os.path.join(lists, "partial"), exist_ok=True)
        os.makedirs(os.path.join(folder, "archives", "partial"), exist_ok=True)
        if not os.listdir(os.path.join(lists, "partial")) and len(os.listdir(lists)) == 1:
            subprocess.call(["apt-get", *own, "update"], **quiet)
        if subprocess.call(["apt-get", *own, "download", package], **quiet) != 0:
            return False
    files = [file for file in os.listdir(folder) if file.startswith(package + "_") and file.endswith(".deb")]
    return bool(files) and subprocess.call(["dpkg-deb", "-x", files[0], folder], **quiet) == 0


def _torch_source(python):
    """More arguments for pip, so that a machine without a GPU gets the CPU build of torch."""
    if _has_gpu():
        return []
    query = ["--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-", TORCH]
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *query]
    report = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL).decode())
    needs = report["install"][0]["metadata"].get("requires_dist", [])
    if not any(re.match("nvidia-|cuda-", need) for need in needs):
        return []
    _say("no NVIDIA GPU found: taking torch's CPU build")
    return ["--extra-index-url", TORCH_CPU_INDEX]


def _has_gpu():
    try:
        return b"GPU " in subprocess.check_output(["nvidia-smi", "-L"], stderr=subprocess.DEVNULL)
    except (OSError, subprocess.CalledProcessError):
        return False


def _run(command):
    code = subprocess.call(command)
    if code != 0:
        sys.exit(f"This command failed (exit status {code}), see its message above: {' '.join(command)}")


def _say(text):
    print(f"[setup] {text}", flush=True)


if __name__ == "__main__":
    main()
