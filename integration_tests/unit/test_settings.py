"""Switches: every value, what a bad one says, and names that are no switch."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kvmend.errors import SettingsError
from kvmend.settings import Setting, allowed_values, pin_state_dir, setting_of, state_dir, strict, unknown_variables
from support.toyfix import make_fix

FIX = make_fix()
MODAL = make_fix(modes=("safe", "eager"))


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, Setting(wanted=True, mode="1", forced=False, reason="KVMEND_TOY_COUNT=1")),
        (
            {"KVMEND": "1", "KVMEND_TOY_COUNT": "1"},
            Setting(wanted=True, mode="1", forced=False, reason="KVMEND_TOY_COUNT=1"),
        ),
        ({"KVMEND_TOY_COUNT": "0"}, Setting(wanted=False, mode="", forced=False, reason="KVMEND_TOY_COUNT=0")),
        ({"KVMEND_TOY_COUNT": "force"}, Setting(wanted=True, mode="1", forced=True, reason="KVMEND_TOY_COUNT=force")),
        ({"KVMEND": "0"}, Setting(wanted=False, mode="", forced=False, reason="KVMEND=0")),
        ({"KVMEND": "0", "KVMEND_TOY_COUNT": "force"}, Setting(wanted=False, mode="", forced=False, reason="KVMEND=0")),
    ],
)
def test_a_switch_takes_one_zero_and_force_and_the_master_switch_is_above_it(
    environ: dict[str, str], expected: Setting
) -> None:
    assert setting_of(FIX, environ) == expected


@pytest.mark.parametrize(
    ("value", "mode", "forced"),
    [("1", "safe", False), ("force", "safe", True), ("safe", "safe", False), ("eager", "eager", False)],
)
def test_a_fix_with_modes_takes_them_too_and_the_first_is_the_default(value: str, mode: str, forced: bool) -> None:
    setting = setting_of(MODAL, {"KVMEND_TOY_COUNT": value})
    assert (setting.wanted, setting.mode, setting.forced) == (True, mode, forced)


@pytest.mark.parametrize("value", ["", " 1", "1 ", "true", "yes", "2", "on", "FORCE", "Safe", "eager"])
def test_any_other_value_is_an_error_that_names_variable_value_and_choices(value: str) -> None:
    with pytest.raises(SettingsError) as caught:
        setting_of(FIX, {"KVMEND_TOY_COUNT": value})
    assert str(caught.value) == f"KVMEND_TOY_COUNT={value!r} is not allowed; allowed: 1, 0, force"
    assert (caught.value.variable, caught.value.value) == ("KVMEND_TOY_COUNT", value)
    assert caught.value.allowed == allowed_values(FIX)


def test_the_choices_of_a_fix_with_modes_include_them() -> None:
    with pytest.raises(SettingsError, match=r"allowed: 1, 0, force, safe, eager$"):
        setting_of(MODAL, {"KVMEND_TOY_COUNT": "lazy"})


@pytest.mark.parametrize("value", ["", "force", "off"])
def test_the_master_switch_takes_only_one_and_zero(value: str) -> None:
    with pytest.raises(SettingsError, match=f"^KVMEND={value!r} is not allowed; allowed: 1, 0$"):
        setting_of(FIX, {"KVMEND": value})


def test_a_bad_value_of_a_fix_is_an_error_even_when_the_master_switch_is_off() -> None:
    with pytest.raises(SettingsError):
        setting_of(FIX, {"KVMEND": "0", "KVMEND_TOY_COUNT": "maybe"})


def test_strict_takes_one_and_zero_and_is_off_by_default() -> None:
    assert [strict({}), strict({"KVMEND_STRICT": "0"}), strict({"KVMEND_STRICT": "1"})] == [False, False, True]
    with pytest.raises(SettingsError, match=r"^KVMEND_STRICT='true' is not allowed; allowed: 1, 0$"):
        strict({"KVMEND_STRICT": "true"})


def test_an_empty_report_folder_is_no_folder() -> None:
    assert [state_dir({}), state_dir({"KVMEND_STATE_DIR": ""}), state_dir({"KVMEND_STATE_DIR": "/x"})] == [
        None,
        None,
        "/x",
    ]


def test_the_report_folder_is_absolute_and_a_tilde_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/operator")
    assert state_dir({"KVMEND_STATE_DIR": "state"}) == f"{tmp_path}/state"
    assert state_dir({"KVMEND_STATE_DIR": "~/state/../x"}) == "/home/operator/x"
    with pytest.raises(SettingsError, match=r"^KVMEND_STATE_DIR='~nobody-at-all/x' is not allowed"):
        state_dir({"KVMEND_STATE_DIR": "~nobody-at-all/x"})


@pytest.mark.parametrize("value", [None, "", "/absolute/../as/given", "relative"])
def test_pinning_changes_a_relative_report_folder_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, value: str | None
) -> None:
    monkeypatch.chdir(tmp_path)
    if value is not None:
        monkeypatch.setenv("KVMEND_STATE_DIR", value)
    pin_state_dir()
    assert os.environ.get("KVMEND_STATE_DIR") == (f"{tmp_path}/relative" if value == "relative" else value)


def test_switches_are_read_when_asked_for_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert setting_of(FIX).wanted
    monkeypatch.setenv("KVMEND_TOY_COUNT", "0")
    assert not setting_of(FIX).wanted


def test_variables_that_look_like_switches_and_are_none_are_found() -> None:
    environ = {"KVMEND": "1", "KVMEND_STRICT": "1", "KVMEND_STATE_DIR": "", "KVMEND_TOY_COUNT": "1", "PATH": "/bin"}
    assert unknown_variables([FIX], environ) == ()
    environ |= {"KVMEND_TOY_CUONT": "0", "KVMEND_STRIKT": "1"}
    assert unknown_variables([FIX], environ) == ("KVMEND_STRIKT", "KVMEND_TOY_CUONT")
