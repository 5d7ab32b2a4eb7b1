"""Codecs for tests that need no server."""

from __future__ import annotations

from embedserve.codec.codec import Codecs

CODECS = Codecs()
JSON, PROTOBUF, ARROW = CODECS.json, CODECS.protobuf, CODECS.arrow
