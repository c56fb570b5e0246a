"""Every check of this repository; ``nox`` runs the default ones, ``nox -l`` lists all."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

PROJECT = nox.project.load_toml("pyproject.toml")
TORCH = "torch==2.13.0"  # installed first and by this exact name, so that nothing else chooses torch's build
# their requirements ask for builds that there are none of, or for what the models do not use
ZOO_ALONE = ["torchvision==0.28.0", "segmentation_models_pytorch==0.6.0", "openai-whisper==20250625", "litgpt==0.5.13"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # bitwise comparisons need equal thread counts, and the tests run side by side


def install(session: nox.Session, group: str) -> None:
    """Install torch, then this package in place, then a dependency group."""
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(PROJECT, group))


@nox.session
def lint(session: nox.Session) -> None:
    """Style: ruff's rules and its format."""
    session.install(*nox.project.dependency_groups(PROJECT, "lint"))
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def layers(session: nox.Session) -> None:
    """Imports run one way; read from the source, so nothing of ours is installed."""
    session.install(*nox.project.dependency_groups(PROJECT, "layers"))
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "passes"})


@nox.session
def typecheck(session: nox.Session) -> None:
    """Types: mypy, strict."""
    install(session, "types")
    session.run("mypy")


@nox.session
def tests(session: nox.Session) -> None:
    """Tests and the examples in docstrings; ``nox -s tests -- -k chimera`` narrows."""
    install(session, "tests")
    everything = ["--doctest-modules", "tests", "fxchimera", "passes"]
    session.run("pytest", "-n", "2", "--dist", "worksteal", *(session.posargs or everything), env=ONE_THREAD)


@nox.session(default=False)
def parity(session: nox.Session) -> None:
    """Compare every model, stage count, micro-batch count and schedule with the plain model (slow)."""
    install(session, "tests")
    where = session.posargs or ["tests/local", "tests/process"]
    session.run("pytest", "-n", "2", "--dist", "worksteal", "-m", "matrix", *where, env=ONE_THREAD)


@nox.session(default=False)
def torture(session: nox.Session) -> None:
    """Plant faults of every kind at every place, on ranks of threads and of processes, with slow ranks and random orders (slow)."""
    install(session, "tests")
    where = session.posargs or ["tests/local", "tests/process"]
    session.run("pytest", "-n", "2", "--dist", "worksteal", "-m", "torture", *where, env=ONE_THREAD)


@nox.session(default=False)
def planted(session: nox.Session) -> None:
    """Plant known bugs one at a time, and say which of them no test notices (slow); words after ``--`` choose."""
    install(session, "tests")
    session.run("python", "-m", "tests.planted", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def exhaustive(session: nox.Session) -> None:
    """Prove every order of every family in all cells, thousands of mutants, and the search against an exact solver (slow)."""
    install(session, "tests")
    session.install("ortools>=9.15")
    where = session.posargs or ["tests/pure"]
    exploring = {**ONE_THREAD, "HYPOTHESIS_PROFILE": "exploring"}
    session.run("pytest", "-n", "2", "--dist", "worksteal", "-m", "matrix or not matrix", *where, env=exploring)


@nox.session(default=False)
def zoo(session: nox.Session) -> None:
    """Wrap every model of the zoo beside this repository and compare it with the plain one; names or options go after ``--``."""
    if not (Path(__file__).resolve().parent.parent / "shared" / "zoo" / "zoo.py").exists():
        session.skip("the zoo, ../shared/zoo/zoo.py, is not there")
    install(session, "tests")
    session.install(*nox.project.dependency_groups(PROJECT, "zoo"), TORCH)
    session.install("--no-deps", *ZOO_ALONE)
    session.run("python", "-m", "tests.zoo_runner", *session.posargs, env={**ONE_THREAD, "PYTHONPATH": "passes"})


@nox.session(default=False)
def gpu(session: nox.Session) -> None:
    """On a GPU (several minutes): parity with ranks that share it, late streams, waits of the host, and a picture of a step."""
    if shutil.which("nvidia-smi") is None:
        session.skip("there is no nvidia-smi, so no CUDA device")
    install(session, "tests")
    folder = session.create_tmp()
    surroundings = {**ONE_THREAD, "FXCHIMERA_GPU": "1", "FXCHIMERA_ARTIFACTS": folder}
    session.run("pytest", "-m", "cuda", *(session.posargs or ["tests/gpu"]), env=surroundings)
    found = Path(folder, "messages.txt")
    session.log(f"{found.read_text() if found.exists() else ''}; the step's picture and its trace for Perfetto are in {folder}")


@nox.session(default=False)
def bench(session: nox.Session) -> None:
    """Emulated devices, ours beside torch's schedules; options go after ``--``."""
    session.install(TORCH)
    session.install("-e", ".")
    session.run("python", "benchmarks/emulated.py", *session.posargs, env=ONE_THREAD)


@nox.session(default=False)
def wheel(session: nox.Session) -> None:
    """Build the wheel, look at its top level, install it and import it from elsewhere."""
    folder = Path(session.create_tmp())
    for old in folder.glob("*.whl"):
        old.unlink()
    session.run("pip", "wheel", ".", "--no-deps", "--wheel-dir", str(folder))
    (built,) = folder.glob("*.whl")
    names = {name.split("/")[0] for name in zipfile.ZipFile(built).namelist()}
    if extra := {name for name in names if not name.endswith(".dist-info")} ^ {"fxchimera", "fxchimera_passes"}:
        session.error(f"the wheel's top level should be fxchimera and fxchimera_passes; extra or missing: {sorted(extra)}")
    session.install(TORCH)
    session.install("--force-reinstall", "--no-deps", str(built))
    session.install(str(built))
    session.chdir("/")
    session.run("python", "-c", "import fxchimera.passes; from fxchimera import pipeline; print(fxchimera.__file__)")
    session.run("fxchimera", "--help")
