"""Servers that run on while their installation, their disk or their folder of reports is taken from under them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import kvmend as package
from kvmend.cli.gathering import gather
from kvmend.process import own
from support.interpreter import SOURCES, Answer, clean_environment, kvmend, run
from support.reporting import reports, until, write_report
from support.toyfw import register_fix, write_release

#: A server: loads kvmend, has its first report, then does what is asked on standard input until that ends.
SERVER = """
import os, sys
from pathlib import Path
from support.reporting import reports, until
from kvmend import freshener, loading
freshener.INTERVAL = freshener.SPACING = 0.02
loading.load("toyfw")
import toyfw.engine
STATE = Path(os.environ["KVMEND_STATE_DIR"])
until(lambda: STATE.is_dir() and reports(STATE))
print("up", flush=True)
for line in sys.stdin:
    print(toyfw.engine.Engine().lookup("a"), flush=True)
"""


@pytest.fixture
def toy(root: Path) -> Path:
    write_release(root)
    register_fix(root)
    return root


class Server:
    """A process that serves one request for each line, with kvmend from a folder of its own."""

    def __init__(self, toy: Path, site: Path, code: str = SERVER, **env: str) -> None:
        self.state = toy / "state"
        environment = clean_environment({"KVMEND_STATE_DIR": str(self.state)} | env, [site, toy])
        # Not the installation of these tests: only what is in the folder.
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self._said() == "up"

    def _said(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline().strip()
        assert line, self.process.communicate()[1]
        return line

    def serve(self) -> str:
        """Serves one request."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._said()

    def calls(self) -> int:
        """Requests that the report knows of."""
        found = reports(self.state).get(self.process.pid)
        return found["fixes"][0]["counters"]["calls"] if found else 0

    def end(self) -> tuple[int, str]:
        """Ends it in order; exit code and standard error."""
        _, errors = self.process.communicate(timeout=60)
        return self.process.returncode, errors


def site_of(folder: Path, version: str = "") -> Path:
    """A folder with a copy of the host and the fixes, as site-packages has them."""
    for source in SOURCES:
        shutil.copytree(source, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    if version:
        init = folder / "kvmend" / "__init__.py"
        text = init.read_text(encoding="utf-8")
        init.write_text(text.replace(f'"{package.__version__}"', f'"{version}"'), encoding="utf-8")
    return folder


def test_uninstalling_under_a_running_server_leaves_it_running_and_its_end_clean(toy: Path) -> None:
    """Catches a module that is imported, or a file that is read, only when it is needed."""
    site = site_of(toy / "site")
    server = Server(toy, site)
    assert server.serve() == "found a +kvmend"
    shutil.rmtree(site)
    (toy / "toy_fixes.py").unlink()
    assert server.serve() == "found a +kvmend"
    until(lambda: server.calls() == 2)
    assert server.end() == (0, "")
    (data,) = reports(server.state).values()
    assert data["ended"] is not None


def test_an_upgrade_in_place_shows_the_old_version_until_the_restart_and_then_both(toy: Path) -> None:
    site = site_of(toy / "site")
    old = Server(toy, site)
    shutil.rmtree(site)
    site_of(site, "9.9.9")
    new = Server(toy, site)
    assert [server.serve() for server in (old, new)] == ["found a +kvmend"] * 2
    until(lambda: old.calls() == new.calls() == 1)
    done = kvmend("status", "--json", "--state-dir", str(old.state))
    versions = {each["pid"]: (each["kvmend"], each["state"]) for each in done.value["processes"]}
    assert versions == {
        old.process.pid: (package.__version__, "running"),
        new.process.pid: ("9.9.9", "running"),
    }
    assert old.end() == new.end() == (0, "")


def test_two_processes_with_one_pid_in_two_containers_keep_two_reports(toy: Path) -> None:
    """Catches containers that overwrite each other's reports: in each of them the server is pid 1, or soon after."""
    code = """
from kvmend import process, report
process._namespace = lambda: "pid:[{}]"
process.os.getpid = lambda: 1
answer(report.write())
"""
    answers = [run(code.format(number), path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")}) for number in (1, 2)]
    assert len({each.value for each in answers}) == 2
    assert len(list((toy / "state").iterdir())) == 2


def test_a_site_packages_that_cannot_be_written_and_no_home_are_no_obstacle(toy: Path) -> None:
    site = site_of(toy / "site")
    before = sorted(site.rglob("*"))
    environment = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "TMPDIR"), "/nowhere/at/all")
    server = Server(toy, site, **environment, PYTHONDONTWRITEBYTECODE="")
    assert server.serve() == "found a +kvmend"
    assert server.end() == (0, "")
    written = {file for file in site.rglob("*") if "__pycache__" not in file.parts} - set(before)
    assert written == set()


@pytest.mark.parametrize("locale", [{"LC_ALL": "C"}, {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}])
def test_a_locale_without_utf8_hurts_neither_the_server_nor_the_report(toy: Path, locale: dict[str, str]) -> None:
    """Catches a log line or a command line with a letter that the locale does not know."""
    code = """
import logging, sys
logging.basicConfig(level="DEBUG", stream=sys.stdout)
sys.argv += ["m\\u00fcnchen", "bad\\udcff"]
from kvmend import freshener, loading
loading.load("toyfw")
import toyfw.engine
answer(toyfw.engine.Engine().lookup("a"))
"""
    probe = (
        "lambda sources: __import__('kvmend.api').api.Finding(state='affected', reason='0.8.5 – 0.26.0, g\u00fcnther')"
    )
    register_fix(toy, f"make_fix(probe={probe})")
    done = run(code, path=[toy], env=locale | {"KVMEND_STATE_DIR": str(toy / "state")})
    assert done.value == "found a +kvmend"
    (data,) = reports(toy / "state").values()
    assert data["command"][-2:] == ["m\u00fcnchen", "bad\udcff"]
    assert data["fixes"][0]["reason"] == "0.8.5 – 0.26.0, g\u00fcnther"


# Disks --------------------------------------------------------------------------------------------------------------

_LIMITED = """
import json, os, resource
from pathlib import Path
from support.reporting import reports, until
from kvmend import freshener, loading, report, voice
freshener.INTERVAL = freshener.SPACING = 0.02
STATE = Path(os.environ["KVMEND_STATE_DIR"])
STATE.mkdir()
limit = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, limit[1]))
loading.load("toyfw")
import toyfw.engine
until(lambda: voice._warned)
looks = []
plain = report.write
report.write = lambda **options: looks.append(plain(**options))
for number in range(5):
    toyfw.engine.Engine().lookup("a")
    until(lambda: len(looks) > number)
left = sorted(file.name for file in STATE.iterdir())
resource.setrlimit(resource.RLIMIT_FSIZE, limit)
toyfw.engine.Engine().lookup("a")
until(lambda: reports(STATE))
answer([looks[:5], left])
"""


def test_a_disk_without_room_is_said_once_leaves_nothing_behind_and_reports_go_on_when_there_is_room(
    toy: Path,
) -> None:
    done = run(_LIMITED, path=[toy], env={"KVMEND_STATE_DIR": str(toy / "state")})
    assert done.value == [[None] * 5, []]
    assert done.stderr == f"kvmend: report not written to {toy / 'state'}: File too large\n"
    (data,) = reports(toy / "state").values()
    assert data["fixes"][0]["counters"]["calls"] == 6


def mounted(toy: Path, code: str, options: str) -> Answer:
    """Runs code with a small file system of its own at the folder of reports; skips where mounting is not allowed."""
    state = toy / "state"
    state.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", options, "kvmend-test", str(state)]
    if shutil.which("mount") is None or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        return run(code, path=[toy], env={"KVMEND_STATE_DIR": str(state)})
    finally:
        subprocess.run(["umount", str(state)], check=True)


def test_a_file_system_that_is_full_does_not_hurt(toy: Path) -> None:
    code = """
import os
from pathlib import Path
from support.reporting import reports, until
from kvmend import freshener, loading, voice
freshener.INTERVAL = freshener.SPACING = 0.02
STATE = Path(os.environ["KVMEND_STATE_DIR"])
with (STATE / "filler").open("wb", buffering=0) as filler:
    try:
        while filler.write(b"x" * 4096):
            pass
    except OSError:
        pass
loading.load("toyfw")
import toyfw.engine
until(lambda: voice._warned)
toyfw.engine.Engine().lookup("a")
left = [file.name for file in STATE.iterdir()]
(STATE / "filler").unlink()
toyfw.engine.Engine().lookup("a")
until(lambda: reports(STATE))
answer(left)
"""
    done = mounted(toy, code, "size=64k")
    assert set(done.value) <= {"filler", *[name for name in done.value if name.endswith(".tmp")]}
    assert done.stderr == f"kvmend: report not written to {toy / 'state'}: No space left on device\n"


def test_a_file_system_that_is_read_only_does_not_hurt(toy: Path) -> None:
    code = """
from support.reporting import until
from kvmend import freshener, loading, voice
loading.load("toyfw")
import toyfw.engine
until(lambda: voice._warned)
answer(toyfw.engine.Engine().lookup("a"))
"""
    done = mounted(toy, code, "size=64k,ro")
    assert done.value == "found a +kvmend"
    assert done.stderr == f"kvmend: report not written to {toy / 'state'}: Read-only file system\n"


# Many ---------------------------------------------------------------------------------------------------------------

_CROWD = """
import os, sys
# 50 processes that start at once, and load kvmend each for itself; only the imports were done before.
from kvmend import freshener, loading, registry, report
registry.discover()
freshener.PATIENCE = 100
children, (start, begin) = [], os.pipe()
for _ in range(50):
    pid = os.fork()
    if pid == 0:
        os.close(begin)
        os.read(start, 1)
        loading.load("toyfw")
        import toyfw.engine
        toyfw.engine.Engine().lookup("a")
        freshener.finish()
        os._exit(0)
    children.append(pid)
print("ready", flush=True)
sys.stdin.read()
os.close(begin)
sys.exit(any(os.waitpid(pid, 0)[1] for pid in children))
"""


def test_two_hundred_processes_that_start_at_once_lose_no_report_and_spoil_none(toy: Path) -> None:
    state = toy / "state"
    environment = clean_environment({"KVMEND_STATE_DIR": str(state)}, [toy])
    with contextlib.ExitStack() as stack:
        parents = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", _CROWD],
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(4)
        ]
        for parent in parents:
            assert parent.stdout is not None
            assert parent.stdout.readline() == "ready\n"
        for parent in parents:
            assert parent.stdin is not None
            parent.stdin.close()
        while any(parent.poll() is None for parent in parents):
            kvmend_sees(state)
        assert [parent.returncode for parent in parents] == [0] * 4
    found = reports(state)
    assert len(found) == len(list(state.iterdir())) == 200
    fixes = [each["fixes"][0] for each in found.values()]
    assert {(fix["outcome"], fix["counters"]["calls"], fix["inherited"]) for fix in fixes} == {("applied", 1, False)}
    assert all(each["ended"] for each in found.values())


def kvmend_sees(state: Path) -> None:
    """Reads the folder as `kvmend status` does, while others write to it: never anything that is no report."""
    time.sleep(0.2)
    if state.is_dir():
        assert gather(str(state)).unreadable == ()


def test_status_reads_a_thousand_reports_in_seconds(tmp_path: Path) -> None:
    for pid in range(1, 1001):
        write_report(tmp_path, process=dataclasses.replace(own(), boot="another", pid=pid))
    done = kvmend("status", "--json", "--state-dir", str(tmp_path))
    assert (done.code, len(done.value["processes"])) == (0, 1000)
    assert json.loads(done.stdout)["counts"]["running"] == 1000
