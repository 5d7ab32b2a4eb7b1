"""Tests of the URL of a broker: which URLs are accepted, and that no message contains the
password."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from embedserve_store import StoreError
from embedserve_store.deltas.notify import broker_url
from embedserve_store.deltas.notify.broker import Topic, described_error
from embedserve_store.deltas.notify.broker_url import FILE_BYTES_MAX, BrokerUrl, read_broker_url

SECRET = "p%40ss"


@pytest.mark.parametrize(
    ("text", "expected", "shown"),
    [
        ("redis://broker", BrokerUrl("redis", "broker", 6379), "redis://broker:6379"),
        ("redis://broker:7/3", BrokerUrl("redis", "broker", 7, 3), "redis://broker:7/3"),
        (
            f"rediss://me:{SECRET}@broker/",
            BrokerUrl("rediss", "broker", 6379, 0, "me", "p@ss"),
            "rediss://broker:6379",
        ),
        (
            f"redis://:{SECRET}@[::1]:7",
            BrokerUrl("redis", "::1", 7, 0, "", "p@ss"),
            "redis://[::1]:7",
        ),
        ("nats://broker", BrokerUrl("nats", "broker", 4222), "nats://broker:4222"),
        (
            "tls://token@broker:7",
            BrokerUrl("tls", "broker", 7, 0, "token"),
            "tls://broker:7",
        ),
    ],
)
def test_broker_url_is_read_directly_or_from_a_file(
    tmp_path: Path, text: str, expected: BrokerUrl, shown: str
) -> None:
    file = tmp_path / "broker"
    file.write_text(f"{text}\n")
    for notify in (text, file, str(file)):
        found = read_broker_url(notify)
        assert found == expected
        assert str(found) == shown
        assert "p@ss" not in repr(found)
    assert found.is_tls == text.startswith(("rediss", "tls"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"http://me:{SECRET}@broker", "the scheme is 'http'; expected redis://HOST"),
        (f"redis://me:{SECRET}@", "names no host or port"),
        (f"redis://me:{SECRET}@broker:0", "names no host or port"),
        (f"redis://me:{SECRET}@broker:port", "is no URL"),
        (f"redis://me:{SECRET}@broker/name", "the path is '/name'"),
        (f"redis://me:{SECRET}@broker/12345", "the path is '/12345'"),
        (f"nats://me:{SECRET}@broker/3", "the path is '/3'"),
        (f"redis://me:{SECRET}@broker?ssl_cert_reqs=none", "has a query or fragment"),
    ],
)
def test_invalid_broker_url_is_rejected_without_showing_its_password(
    tmp_path: Path, text: str, reason: str
) -> None:
    file = tmp_path / "broker"
    file.write_text(text)
    for notify, where in ((text, "delta notify"), (str(file), f"delta notify {file}")):
        with pytest.raises(StoreError) as caught:
            read_broker_url(notify)
        assert str(caught.value).startswith(f"{where}: {reason}")
        assert SECRET not in str(caught.value)
        assert "p@ss" not in str(caught.value)


def test_missing_or_oversized_url_file_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is no URL, and no file that can be read: No such file"):
        read_broker_url(tmp_path / "missing")
    (tmp_path / "large").write_bytes(b"redis://" + b"h" * FILE_BYTES_MAX)
    with pytest.raises(StoreError, match="has more than 4096 bytes"):
        read_broker_url(tmp_path / "large")


@pytest.mark.parametrize(
    ("text", "extra", "package"), [("redis://h", "redis", "redis"), ("tls://h", "nats", "nats-py")]
)
def test_missing_client_package_is_named_in_the_error(
    monkeypatch: pytest.MonkeyPatch, text: str, extra: str, package: str
) -> None:
    monkeypatch.setattr(
        broker_url, "find_spec", lambda name: None if name == extra else find_spec(name)
    )
    with pytest.raises(StoreError, match=rf"needs {package}: pip install 'embedserve\[{extra}\]'$"):
        read_broker_url(text)


def test_topic_names_contain_model_and_line() -> None:
    topic = Topic("a.b-c", 7)
    assert topic.redis_key == "embedserve:deltas:a.b-c:7"
    assert topic.nats_subject == "embedserve.deltas.a/b-c.7"


def test_described_error_is_one_line_without_the_password() -> None:
    url = BrokerUrl("redis", "broker", 6379, password="p@ss")
    error = described_error(ValueError("no\n  such \x1b[2J 'p@ss' " + "x" * 500), url)
    assert error.startswith("redis://broker:6379: ValueError: no such ?[2J '***' xxx")
    assert len(error) == 200
    assert described_error(TimeoutError(), url) == "redis://broker:6379: TimeoutError"
