"""Builds the wheel and the sdist, looks into them, and runs the README's loop with the wheel alone.

    python .ci/package.py [--other-pythons python3.12 python3.13]

The loop runs on the Python that runs this script, in a fresh environment without extras. The other Pythons
get the wheel without its dependencies, read its metadata and compile every module, warnings as errors: which
torch a package index offers for them differs from machine to machine, and may be gigabytes of CUDA. They are
looked for on the PATH and among pyenv's versions. What was not tried is said.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT = 1_000_000  # bytes of either

# What no wheel may lack: a type marker, and the texts that pages are made of.
NEEDED = ("adambs/py.typed", "adambs/pages/base.html", "adambs/pages/base.css", "adambs/lab/report/report.js")

LOOP = """
import sys
import torch
import torch.nn.functional as F
import adambs

torch.manual_seed(0)
inputs = torch.randn(1024, 5)
labels = (inputs[:, 0] > 1).long()
train = torch.utils.data.TensorDataset(inputs, labels)
model = torch.nn.Linear(5, 2)
before = F.cross_entropy(model(inputs), labels).item()
{loop}
after = F.cross_entropy(model(inputs), labels).item()
assert after < before, (before, after)
extras = {{"typer", "rich", "matplotlib", "plotly", "sklearn", "scipy"}} & set(sys.modules)
assert not extras, extras
print(f"adambs {{adambs.__version__}}, torch {{torch.__version__}}: loss {{before:.3f}} -> {{after:.3f}}")
"""

METADATA = """
from importlib import metadata
found = metadata.metadata("adambs")
from packaging.specifiers import SpecifierSet
import platform
assert platform.python_version() in SpecifierSet(found["Requires-Python"])
print(found["Name"], found["Version"], "for Python", found["Requires-Python"])
"""


def main() -> None:
    """Build, look, install, run."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--other-pythons", nargs="*", default=["python3.12", "python3.13"])
    others = {name: find_python(name) for name in arguments.parse_args().other_pythons}
    print(f"Python {sys.version.split()[0]}: this one builds, installs and runs the loop.")
    for name, found in others.items():
        print(f"{name}: {found or 'not on the PATH and not among the versions of pyenv, so not tried'}")
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        tools = environment(work / "tools", sys.executable)
        run(tools, "-m", "pip", "install", "--quiet", "build", "twine")
        run(tools, "-m", "build", "--outdir", str(work / "dist"), str(ROOT))
        (wheel,), (sdist,) = work.glob("dist/*.whl"), work.glob("dist/*.tar.gz")
        run(tools, "-m", "twine", "check", "--strict", str(wheel), str(sdist))
        check_contents(wheel, sdist)
        python = environment(work / "fresh", sys.executable)
        run(python, "-m", "pip", "install", "--quiet", "-c", str(ROOT / "constraints.txt"), str(wheel))
        run(python, "-c", LOOP.format(loop=readme_loop()), cwd=work)
        print(f"Python {sys.version.split()[0]}: installed without extras, the README's loop ran.")
        for name, found in others.items():
            if found is not None:
                try_other(name, found, wheel, work)


def check_contents(wheel: Path, sdist: Path) -> None:
    """Nothing is missing, and nothing is there that nobody needs."""
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = [name for name in NEEDED if name not in names]
    strangers = [name for name in names if not name.startswith(("adambs/", "adambs-"))]
    with tarfile.open(sdist) as archive:
        inside = [name.partition("/")[2] for name in archive.getnames()]
    records = [name for name in inside if name.startswith("results")]
    for wrong in (missing, strangers, records):
        if wrong:
            sys.exit(f"the packages are wrong: missing {missing}, strange {strangers}, records {records}")
    for file in (wheel, sdist):
        size = file.stat().st_size
        if size > LIMIT:
            sys.exit(f"{file.name} has {size:,} bytes, more than {LIMIT:,}")
        print(f"{file.name}: {size:,} bytes, no records")


def readme_loop() -> str:
    """The lines of the README's diff that are there after it."""
    [diff] = re.findall(r"```diff\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    kept = "\n".join(line[1:] for line in diff.splitlines() if line[:1] in (" ", "+"))
    return kept.replace("num_workers=2", "num_workers=0")  # -c has no file that a worker could import


def try_other(name: str, found: str, wheel: Path, work: Path) -> None:
    """The wheel without its dependencies on another Python."""
    python = environment(work / name, found)
    run(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", str(wheel))
    run(python, "-m", "pip", "install", "--quiet", "packaging")
    run(python, "-c", METADATA, cwd=work)
    [package] = python.parent.parent.glob("lib/*/site-packages/adambs")
    run(python, "-W", "error", "-m", "compileall", "-q", str(package))
    print(f"{name}: installed without dependencies, metadata read, every module compiled without a warning.")
    print(f"{name}: NOT imported and NOT run, no torch was installed for it.")


def find_python(name: str) -> str | None:
    """The newest interpreter ``name`` that starts: on the PATH, else pyenv's, whose shims need a choice."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    versions = sorted(pyenv.glob(f"versions/*/bin/{name}"), key=release, reverse=True)
    for candidate in (shutil.which(name), *map(str, versions)):
        if candidate and subprocess.run([candidate, "-V"], capture_output=True).returncode == 0:
            return candidate
    return None


def release(python: Path) -> list[int]:
    """(3, 12, 1) of ``.../3.12.1/bin/python3.12``."""
    return [int(number) for number in re.findall(r"\d+", python.parent.parent.name)]


def environment(folder: Path, python: str) -> Path:
    """A fresh one; its Python."""
    if python == sys.executable:
        venv.create(folder, with_pip=True)
    else:
        subprocess.run([python, "-m", "venv", str(folder)], check=True)
    return folder / "bin" / "python"


def run(python: Path, *arguments: str, cwd: Path | None = None) -> None:
    """Run to the end, or stop everything."""
    done = subprocess.run([str(python), *arguments], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)[:200]} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    if arguments[0] == "-c":
        print(done.stdout.strip())


if __name__ == "__main__":
    main()
