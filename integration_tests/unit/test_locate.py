"""Finding a framework's files without importing it: installed, in a folder, in a wheel."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from kvmend.errors import LocateError
from kvmend.locate import Distribution, Installation, locate_installed, locate_path
from support.toyfix import TOYFW
from support.toyfw import write_dist_info, write_module, write_release, write_wheel

TOY = Distribution(name="toyfw", version="1.0")


def at(path: Path) -> Installation:
    installation = locate_path(TOYFW, path)
    assert installation is not None
    return installation


def lookup_of(installation: Installation) -> str:
    body = installation.body("toyfw.engine", "Engine.lookup")
    assert body is not None
    return f"{body.path}:{body.line}"


# Installed here -----------------------------------------------------------------------------------------------------


def test_what_import_would_find_is_found_and_not_imported(root: Path) -> None:
    package = write_release(root)
    installation = locate_installed(TOYFW)
    assert installation is not None
    assert (installation.location, installation.distributions, installation.version) == (str(package), (TOY,), "1.0")
    assert lookup_of(installation) == f"{package}/engine.py:10"
    assert "toyfw" not in sys.modules


def test_what_was_imported_is_what_is_found_even_if_the_path_has_changed(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    package = write_release(root)
    import toyfw  # type: ignore[import-not-found]

    assert toyfw.__version__ == "1.0"
    other = tmp_path_factory.mktemp("other")
    write_release(other, "2.0")
    monkeypatch.syspath_prepend(str(other))
    installation = locate_installed(TOYFW)
    assert installation is not None
    assert installation.location == str(package)


def test_a_framework_that_is_not_there_is_none(root: Path) -> None:
    assert locate_installed(TOYFW) is None


def test_a_folder_without_init_is_no_installation(root: Path) -> None:
    (root / "toyfw").mkdir()
    (root / "toyfw" / "engine.py").write_text("x = 1\n", encoding="utf-8")
    assert locate_installed(TOYFW) is None
    assert locate_path(TOYFW, root) is None
    import toyfw

    assert toyfw.__path__
    assert locate_installed(TOYFW) is None


def test_a_script_of_the_frameworks_name_is_no_installation(root: Path) -> None:
    write_module(root, "toyfw", "x = 1\n")
    assert locate_installed(TOYFW) is None
    import toyfw

    assert toyfw.x == 1
    assert locate_installed(TOYFW) is None


def test_a_plain_source_tree_has_no_version(root: Path) -> None:
    write_release(root, dist=None)
    installation = locate_installed(TOYFW)
    assert installation is not None
    assert (installation.distributions, installation.version) == ((), None)


def test_an_editable_installation_has_the_version_that_is_registered_elsewhere(
    root: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkout, site = tmp_path_factory.mktemp("checkout"), root
    write_release(checkout, dist=None)
    write_dist_info(site, "toyfw-cpu", "1.0+dev", {"RECORD": "__editable__.toyfw.pth,,\n"})
    monkeypatch.syspath_prepend(str(checkout))
    installation = locate_installed(TOYFW)
    assert installation is not None
    assert installation.location == str(checkout / "toyfw")
    assert installation.distributions == (Distribution(name="toyfw-cpu", version="1.0+dev"),)


# Who provides it ----------------------------------------------------------------------------------------------------


def test_known_distribution_names_are_found_however_they_are_spelt(tmp_path: Path) -> None:
    write_release(tmp_path, dist="ToyFW-CPU")
    assert at(tmp_path).distributions == (Distribution(name="ToyFW-CPU", version="1.0"),)


def test_an_unknown_distribution_is_found_by_its_top_level(tmp_path: Path) -> None:
    write_release(tmp_path, dist=None)
    write_dist_info(tmp_path, "toyfw-vendor", "7", {"top_level.txt": "other\ntoyfw\n"})
    write_dist_info(tmp_path, "bystander", "3", {"top_level.txt": "toyfwx\n"})
    assert at(tmp_path).distributions == (Distribution(name="toyfw-vendor", version="7"),)


def test_an_unknown_distribution_is_found_by_its_record(tmp_path: Path) -> None:
    write_release(tmp_path, dist=None)
    write_dist_info(tmp_path, "vendor", "7", {"RECORD": "vendor.py,,\ntoyfw/__init__.py,sha256=x,1\n"})
    write_dist_info(tmp_path, "bystander", "3", {"RECORD": "x/toyfw/__init__.py,,\ntoyfwx/a.py,,\n"})
    assert at(tmp_path).distributions == (Distribution(name="vendor", version="7"),)


def test_two_distributions_that_provide_the_package_are_both_named_the_usual_one_first(tmp_path: Path) -> None:
    write_release(tmp_path, "1.1", dist="toyfw-cpu")
    write_release(tmp_path, "1.0", dist="toyfw")
    assert at(tmp_path).distributions == (TOY, Distribution(name="toyfw-cpu", version="1.1"))
    assert at(tmp_path).version == "1.0"


def test_a_development_egg_is_a_distribution_too(tmp_path: Path) -> None:
    write_release(tmp_path, dist=None)
    egg = tmp_path / "toyfw.egg-info"
    egg.mkdir()
    (egg / "PKG-INFO").write_text("Name: toyfw\nVersion: 1.0\n", encoding="utf-8")
    assert at(tmp_path).distributions == (TOY,)


def test_a_distribution_without_metadata_is_passed_over(tmp_path: Path) -> None:
    write_release(tmp_path)
    (tmp_path / "toyfw_cpu-9.dist-info").mkdir()
    assert at(tmp_path).distributions == (TOY,)


# In a folder --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "below",
    [
        ".",
        "lib/python3.11/site-packages",
        "lib64/python3.12/site-packages",
        "usr/lib/python3/dist-packages",
        "usr/local/lib/python3.10/dist-packages",
        "usr/local/lib/python3.12/site-packages",
        "opt/conda/lib/python3.11/site-packages",
        "root/.venv/lib/python3.13/site-packages",
        "opt/conda/envs/serving/lib/python3.12/site-packages",
        ".venv/lib/python3.12/site-packages",
        "home/serving/.local/lib/python3.12/site-packages",
    ],
)
def test_a_folder_an_environment_and_a_container_root_are_looked_through(tmp_path: Path, below: str) -> None:
    package = write_release(tmp_path / below)
    installation = at(tmp_path)
    assert (installation.location, installation.distributions) == (str(package), (TOY,))
    assert lookup_of(installation) == f"{package}/engine.py:10"


def test_a_root_with_several_installations_names_the_others(tmp_path: Path) -> None:
    """Catches a verdict on an installation that the server does not use, without a word."""
    first = write_release(tmp_path / "usr/local/lib/python3.12/dist-packages")
    second = write_release(tmp_path / "opt/venv/lib/python3.12/site-packages")
    (tmp_path / "opt/alias").symlink_to("venv")
    assert (at(tmp_path).location, at(tmp_path).others) == (
        str(first),
        (str(tmp_path / "opt/alias" / "/".join(second.parts[-4:])),),
    )


def test_the_package_folder_itself_is_enough(tmp_path: Path) -> None:
    package = write_release(tmp_path)
    assert at(package).location == str(package)
    assert at(package).distributions == (TOY,)


def test_a_checkout_that_has_the_packages_own_name_is_looked_into(tmp_path: Path) -> None:
    package = write_release(tmp_path / "toyfw", dist=None)
    assert at(tmp_path / "toyfw").location == str(package)


def test_a_relative_path_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = write_release(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert at(Path()).location == at(Path("toyfw")).location == str(package)


def test_a_folder_without_the_package_is_none(tmp_path: Path) -> None:
    assert locate_path(TOYFW, tmp_path) is None


def test_a_path_that_does_not_exist_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LocateError, match=f"^{tmp_path}/nowhere: no such file or folder$"):
        locate_path(TOYFW, tmp_path / "nowhere")


# In a wheel ---------------------------------------------------------------------------------------------------------


def test_a_wheel_is_read_in_place(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, dist="toyfw-cpu")
    installation = at(wheel)
    assert installation.location == f"{wheel}!/toyfw"
    assert installation.distributions == (Distribution(name="toyfw-cpu", version="1.0"),)
    assert lookup_of(installation) == f"{wheel}!/toyfw/engine.py:10"


def test_a_wheel_without_the_package_is_none(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("toyfw/engine.py", "x = 1\n")
        archive.writestr("toyfwx/__init__.py", "")
    assert locate_path(TOYFW, tmp_path / "other.whl") is None


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and nothing else", b"plain text"])
def test_a_file_that_is_no_wheel_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.whl").write_bytes(content)
    with pytest.raises(LocateError, match=f"^{tmp_path}/bad.whl: not a wheel"):
        locate_path(TOYFW, tmp_path / "bad.whl")


def test_a_wheel_cut_short_is_an_error(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    wheel.write_bytes(wheel.read_bytes()[:-100])
    with pytest.raises(LocateError, match="not a wheel"):
        locate_path(TOYFW, wheel)


def test_a_damaged_member_of_a_wheel_reads_as_absent(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path)
    content = bytearray(wheel.read_bytes())
    start = content.index(b"toyfw/engine.py") + len("toyfw/engine.py")
    content[start : start + 40] = bytes(byte ^ 0xFF for byte in content[start : start + 40])
    wheel.write_bytes(bytes(content))
    installation = at(wheel)
    assert installation.text("toyfw.engine") is None
    assert installation.body("toyfw.cache", "Cache.get") is not None


# Modules ------------------------------------------------------------------------------------------------------------


def test_a_module_is_a_file_or_a_package(tmp_path: Path) -> None:
    write_release(tmp_path)
    installation = at(tmp_path)
    assert installation.path("toyfw") == str(tmp_path / "toyfw" / "__init__.py")
    assert installation.text("toyfw.cache") == (tmp_path / "toyfw" / "cache.py").read_text(encoding="utf-8")
    assert (
        installation.text("toyfw.none")
        is installation.path("toyfw.none")
        is installation.body("toyfw.none", "f")
        is None
    )


def test_a_byte_order_mark_is_no_part_of_the_source(tmp_path: Path) -> None:
    write_release(tmp_path, changes={"marked": "\ufeffdef f(): return 1\n"})
    assert at(tmp_path).body("toyfw.marked", "f") is not None
    assert (
        at(write_wheel(tmp_path, changes={"marked": "\ufeffdef f(): return 1\n"})).body("toyfw.marked", "f") is not None
    )


def test_a_file_that_is_not_utf_8_reads_as_absent(tmp_path: Path) -> None:
    (write_release(tmp_path) / "latin.py").write_bytes(b"def f(): return '\xe9'\n")
    assert at(tmp_path).text("toyfw.latin") is None


def test_a_body_has_one_fingerprint_in_a_folder_and_in_a_wheel_whatever_its_line_ends(tmp_path: Path) -> None:
    text = "class A:\n    def f(self):\n        return '''a\nb'''\n\n\ndef g(): ...\n"
    write_release(tmp_path, changes={"extra": text})
    folder = at(tmp_path).body("toyfw.extra", "A.f")
    wheel = at(write_wheel(tmp_path, changes={"extra": text.replace("\n", "\r\n")})).body("toyfw.extra", "A.f")
    assert folder is not None
    assert wheel is not None
    assert (folder.fingerprint, folder.line, folder.text) == (wheel.fingerprint, wheel.line, wheel.text)
