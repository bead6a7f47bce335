"""Records of fixes: frozen, and refused where they make no sense."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from kvmend import api
from kvmend.api import Case, Context, Counters, Finding
from kvmend.errors import FixDeclarationError, KvmendError
from support.toyfix import TOYFW, make_fix, site


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id": "Toy"}, "fix id 'Toy' is not lower-case words joined by '-'"),
        ({"id": "toy"}, "fix id 'toy' is not lower-case words joined by '-'"),
        ({"id": "toy_count"}, "fix id 'toy_count' is not"),
        ({"id": "toy-count\n"}, "is not lower-case words"),
        ({"switch": "TOY_COUNT"}, "fix toy-count: switch 'TOY_COUNT' is not of the form KVMEND_NAME"),
        ({"switch": "KVMEND_toy"}, "fix toy-count: switch 'KVMEND_toy'"),
        ({"switch": "KVMEND_TOY=1"}, "fix toy-count: switch"),
        ({"sites": ()}, "fix toy-count names no site"),
        ({"sites": (site("f", "other.mod"),)}, "fix toy-count: other.mod:f is not in the package 'toyfw'"),
        ({"sites": (site("f", "toyfwx.mod"),)}, "fix toy-count: toyfwx.mod:f is not in the package 'toyfw'"),
        ({"bodies": (api.Body(module="os", qualname="walk"),)}, "os:walk is not in the package"),
        ({"counters": {"not a name": ""}}, "fix toy-count: counter 'not a name' is not an identifier"),
        (
            {"counters": {"calls": ""}, "may_fall": ("left",)},
            "fix toy-count: 'left' in may_fall is none of its counters",
        ),
    ],
)
def test_a_record_that_makes_no_sense_is_refused_with_the_reason(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(FixDeclarationError) as caught:
        make_fix(**changes)
    assert message in str(caught.value)


def test_a_finding_in_no_known_state_is_refused() -> None:
    with pytest.raises(
        FixDeclarationError, match="finding state 'broken' is none of affected, fixed, not_affected, unknown"
    ):
        Finding(state="broken", reason="")


@pytest.mark.parametrize("record", [make_fix(), site("f"), TOYFW, Finding(state="fixed", reason="")])
def test_records_are_frozen(record: Any) -> None:
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, "x")


def test_records_take_keywords_only() -> None:
    with pytest.raises(TypeError):
        Finding("fixed", "no keywords")  # type: ignore[misc]


def test_a_site_takes_part_only_in_its_modes_and_where_its_features_are() -> None:
    plain, modal, featured = (
        site("a"),
        site("b", modes=frozenset({"eager"})),
        site("c", features=frozenset({"new", "x"})),
    )
    fix = make_fix(plain, modal, featured, modes=("safe", "eager"))
    assert fix.sites_for("safe", frozenset()) == (plain,)
    assert fix.sites_for("eager", frozenset({"new"})) == (plain, modal)
    assert fix.sites_for("safe", frozenset({"new", "x", "y"})) == (plain, featured)


def test_what_is_read_are_the_sites_and_then_the_bodies() -> None:
    assert [body.key for body in make_fix().read] == ["toyfw.engine:Engine.lookup", "toyfw.engine:Engine.admit"]


def test_a_case_is_right_when_the_measured_value_is_the_expected_one() -> None:
    assert Case(name="x", expected=[1], measured=[1]).right
    assert not Case(name="x", expected=1, measured="1").right


def test_counters_start_at_zero_keep_their_order_and_reset_in_place() -> None:
    counters: Any = Counters({"held": "", "dropped": "", "a": ""})
    counters.dropped += 2
    assert counters.as_dict() == {"held": 0, "dropped": 2, "a": 0}
    counters.reset()
    assert list(counters.as_dict().items()) == [("held", 0), ("dropped", 0), ("a", 0)]
    with pytest.raises(AttributeError, match="hold"):
        counters.hold += 1


def test_sites_of_one_application_share_a_dict_and_two_applications_do_not() -> None:
    def context() -> Context:
        import logging

        return Context(mode="1", features=frozenset(), facts={}, counters=Counters(), log=logging.getLogger("x"))

    assert context().shared == {}
    assert context().shared is not context().shared


def test_every_error_is_a_kvmend_error_with_one_line() -> None:
    from kvmend import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    assert len(kinds) == 7
    assert all(issubclass(kind, KvmendError) for kind in kinds)


def test_the_api_is_the_records_and_the_counters_and_nothing_else() -> None:
    assert set(api.__all__) == {name for name in vars(api) if not name.startswith("_") and name != "annotations"}
