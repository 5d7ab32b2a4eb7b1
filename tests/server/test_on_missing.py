"""Tests of the setting on_missing: fail or zeros, for all tables and by table."""

import re
from dataclasses import replace

import pytest

from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings
from embedserve.on_missing import TABLES_SHOWN_MAX, MissingPolicy

ROUTER = ServeSettings(store="store", shards="file:x")


@pytest.mark.parametrize(
    ("entries", "user_fails", "item_fails"),
    [
        ((), True, True),
        (("fail",), True, True),
        (("zeros",), False, False),
        (("user=zeros",), False, True),
        (("zeros", "user=fail"), True, False),
        (("user=fail", "zeros"), True, False),
        (("user=zeros", "item=zeros"), False, False),
    ],
)
def test_policy_of_a_table_overrides_the_default(
    entries: tuple[str, ...], user_fails: bool, item_fails: bool
) -> None:
    policy = MissingPolicy.parse(entries)
    assert (policy.fails("user"), policy.fails("item")) == (user_fails, item_fails)


def test_a_table_may_have_any_name() -> None:
    policy = MissingPolicy.parse(["a=b=zeros", "zeros=fail"])
    assert not policy.fails("a=b")
    assert policy.fails("zeros")
    assert policy.by_table.keys() == {"a=b", "zeros"}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (("zero",), "on_missing has 'zero', expected fail, zeros, TABLE=fail or TABLE=zeros"),
        (("",), "on_missing has '', expected"),
        (("user=",), "on_missing has 'user=', expected"),
        (("=zeros",), "on_missing has '=zeros', expected"),
        (("fail,user=zero",), "on_missing has 'fail,user=zero', expected"),
        (("user=zeros", "user=fail"), "on_missing names table 'user' twice"),
        (("zeros", "fail"), "on_missing has 2 values for all tables, expected one"),
    ],
)
def test_invalid_entries_are_rejected(entries: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        check_settings(replace(ROUTER, on_missing=entries))


def test_only_routers_accept_on_missing() -> None:
    check_settings(replace(ROUTER, on_missing=("zeros",)))
    with pytest.raises(ValueError, match=r"^on_missing is 'zeros', but this server is no router"):
        check_settings(replace(ROUTER, shards="", on_missing=("zeros",)))


def test_unknown_table_is_rejected_and_known_tables_are_listed() -> None:
    policy = MissingPolicy.parse(["user=zeros"])
    policy.check_tables({"shop": ["item"], "ads": ["user", "ad"]})
    message = "on_missing names table 'user', but 'shop' has item; 'ads' has ad, page"
    with pytest.raises(ValueError, match=f"^{message}$"):
        policy.check_tables({"shop": ["item"], "ads": ["ad", "page"]})
    many = [f"table{i}" for i in range(TABLES_SHOWN_MAX + 2)]
    with pytest.raises(ValueError, match=f"{many[TABLES_SHOWN_MAX - 1]} and 2 more$"):
        policy.check_tables({"shop": many})
