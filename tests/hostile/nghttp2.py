"""A server session of libnghttp2, which records how the library reads a client's bytes.

Calls Debian's libnghttp2-14 through ctypes. The session sends only the responses that HTTP/2
requires, and, if requested, a 204 for each whole request.
"""

import ctypes
import ctypes.util
from collections.abc import Callable
from ctypes import (
    POINTER,
    c_char_p,
    c_int,
    c_int32,
    c_size_t,
    c_ssize_t,
    c_uint8,
    c_uint32,
    c_void_p,
)
from typing import Any

from hostile import frames as f
from hostile.trace import Settings, Trace

TEMPORAL_CALLBACK_FAILURE = -521
NV_FLAG_NONE = 0


class FrameHead(ctypes.Structure):
    """nghttp2_frame_hd, the first member of every nghttp2_frame."""

    _fields_ = (
        ("length", c_size_t),
        ("stream_id", c_int32),
        ("type", c_uint8),
        ("flags", c_uint8),
        ("reserved", c_uint8),
    )


class Setting(ctypes.Structure):
    """Struct nghttp2_settings_entry."""

    _fields_ = (("settings_id", c_int32), ("value", c_uint32))


class NameValue(ctypes.Structure):
    """Struct nghttp2_nv."""

    _fields_ = (
        ("name", c_char_p),
        ("value", c_char_p),
        ("name_bytes", c_size_t),
        ("value_bytes", c_size_t),
        ("flags", c_uint8),
    )


Head = POINTER(FrameHead)
OnFrame = ctypes.CFUNCTYPE(c_int, c_void_p, Head, c_void_p)
OnHeader = ctypes.CFUNCTYPE(
    c_int, c_void_p, Head, c_void_p, c_size_t, c_void_p, c_size_t, c_uint8, c_void_p
)
OnChunk = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint8, c_int32, c_void_p, c_size_t, c_void_p)


def load() -> ctypes.CDLL | None:
    """Loads the library; returns None where it is not installed."""
    try:
        library = ctypes.CDLL("libnghttp2.so.14")
    except OSError:
        return None
    library.nghttp2_session_mem_recv.restype = c_ssize_t
    library.nghttp2_session_mem_recv.argtypes = [c_void_p, c_char_p, c_size_t]
    library.nghttp2_session_mem_send.restype = c_ssize_t
    library.nghttp2_session_mem_send.argtypes = [c_void_p, POINTER(c_void_p)]
    library.nghttp2_submit_settings.argtypes = [c_void_p, c_uint8, c_void_p, c_size_t]
    library.nghttp2_session_set_local_window_size.argtypes = [c_void_p, c_uint8, c_int32, c_int32]
    library.nghttp2_submit_response.argtypes = [c_void_p, c_int32, c_void_p, c_size_t, c_void_p]
    library.nghttp2_session_del.argtypes = [c_void_p]
    library.nghttp2_session_want_read.argtypes = [c_void_p]
    return library


class Nghttp2:
    """One connection: call `receive` until it is over, then `close`.

    Attributes:
        trace: how the library read the client's bytes, and what it sent.
    """

    def __init__(self, library: ctypes.CDLL, settings: Settings, responds: bool) -> None:
        self.trace = Trace()
        self._library = library
        self._responds = responds
        self._fields: dict[int, list[f.Header]] = {}
        self._chunks: dict[int, bytes] = {}
        self._has_failed = False
        self._session = c_void_p()
        self._kept: list[Any] = []
        self._open(settings)

    def receive(self, data: bytes) -> None:
        """Passes the client's next bytes to the library."""
        if self._has_failed:
            return
        read_bytes = self._library.nghttp2_session_mem_recv(self._session, data, len(data))
        self._has_failed = read_bytes != len(data)
        self._send()
        self._has_failed |= not self._library.nghttp2_session_want_read(self._session)

    def close(self) -> None:
        self._library.nghttp2_session_del(self._session)

    def _open(self, settings: Settings) -> None:
        library, callbacks, option = self._library, c_void_p(), c_void_p()
        library.nghttp2_session_callbacks_new(ctypes.byref(callbacks))
        for name, kind, function in (
            ("on_begin_headers", OnFrame, self._on_begin_headers),
            ("on_header", OnHeader, self._on_header),
            ("on_invalid_header", OnHeader, self._on_invalid_header),
            ("on_frame_recv", OnFrame, self._on_frame),
            ("on_data_chunk_recv", OnChunk, self._on_chunk),
        ):
            self._kept.append(kind(function))
            setter: Callable[..., Any] = getattr(
                library, f"nghttp2_session_callbacks_set_{name}_callback"
            )
            setter(callbacks, self._kept[-1])
        library.nghttp2_option_new(ctypes.byref(option))
        library.nghttp2_option_set_no_auto_window_update(option, 1)
        session = ctypes.byref(self._session)
        library.nghttp2_session_server_new2(session, callbacks, None, option)
        library.nghttp2_option_del(option)
        library.nghttp2_session_callbacks_del(callbacks)
        entries = (Setting * len(settings))(*(Setting(*pair) for pair in settings))
        library.nghttp2_submit_settings(self._session, 0, entries, len(settings))
        self._send()

    def _send(self) -> None:
        data = c_void_p()
        while (n := self._library.nghttp2_session_mem_send(self._session, ctypes.byref(data))) > 0:
            assert data.value is not None
            self.trace.sent(ctypes.string_at(data.value, n))

    def _on_begin_headers(self, _session: int, head: Any, _user: int) -> int:
        self._fields[head.contents.stream_id] = []
        return 0

    def _on_header(
        self,
        _session: int,
        head: Any,
        name: int,
        name_bytes: int,
        value: int,
        value_bytes: int,
        *_: int,
    ) -> int:
        field = ctypes.string_at(name, name_bytes), ctypes.string_at(value, value_bytes)
        self._fields[head.contents.stream_id].append(field)
        return 0

    def _on_invalid_header(self, *_: Any) -> int:
        """Rejects the request as malformed by RFC 9113; the library would only drop the field."""
        return TEMPORAL_CALLBACK_FAILURE

    def _on_chunk(
        self, _session: int, _flags: int, stream: int, data: int, nbytes: int, _user: int
    ) -> int:
        self._chunks[stream] = self._chunks.get(stream, b"") + ctypes.string_at(data, nbytes)
        return 0

    def _on_frame(self, _session: int, head: Any, _user: int) -> int:
        """Records a whole frame that the library found valid."""
        stream, kind = head.contents.stream_id, head.contents.type
        ends = bool(head.contents.flags & f.END_STREAM)
        if kind == f.HEADERS:
            self.trace.headers(stream, self._fields.pop(stream), ends)
        elif kind == f.DATA:
            self.trace.data(stream, self._chunks.pop(stream, b""), ends)
        elif kind == f.RST_STREAM:
            self.trace.reset(stream, self._responds)
        if self._responds and ends and kind in (f.HEADERS, f.DATA):
            fields = (NameValue * 1)(NameValue(b":status", b"204", 7, 3, NV_FLAG_NONE))
            self._library.nghttp2_submit_response(self._session, stream, fields, 1, None)
        return 0
