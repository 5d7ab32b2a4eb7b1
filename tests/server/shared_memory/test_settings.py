"""Tests of the conditions for shared memory in the settings."""

from dataclasses import replace

import pytest

from embedserve.config import ServeSettings
from embedserve.config_checks import check_settings

PLAIN = ServeSettings(store="store")
SHARED = replace(PLAIN, shared_memory="/ranker-")
REMOTE_MANAGEMENT = replace(SHARED, management_port=0, management_host="10.0.0.5", tokens="tokens")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (replace(PLAIN, shared_memory="ranker-"), "shared_memory is 'ranker-', expected a slash"),
        (replace(PLAIN, shared_memory="/a/b"), "shared_memory is '/a/b', expected a slash"),
        (replace(PLAIN, shared_memory="/\0"), r"shared_memory is '/.x00', expected a slash"),
        (replace(SHARED, host="0.0.0.0"), "shared_memory is '/ranker-', but host is '0.0.0.0'"),
        (replace(SHARED, host="::"), "shared_memory is '/ranker-', but host is '::', which other"),
        (
            REMOTE_MANAGEMENT,
            "shared_memory is '/ranker-', but management_host is '10.0.0.5', which",
        ),
        (replace(SHARED, workers=2), "shared_memory is '/ranker-', but workers is 2, and a region"),
        (replace(SHARED, grpc_server="grpcio"), "shared_memory is '/ranker-', but grpc_server is"),
    ],
)
def test_invalid_shared_memory_setting_is_rejected(settings: ServeSettings, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        check_settings(settings)
    check_settings(replace(settings, shared_memory=""))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_valid_shared_memory_setting_is_accepted(host: str) -> None:
    check_settings(replace(SHARED, host=host, grpc_uds="grpc.sock"))
    check_settings(replace(PLAIN, shared_memory="/", host=host))
    check_settings(replace(SHARED, management_port=0, tokens="tokens"))
