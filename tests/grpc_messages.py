"""Splits the body of a gRPC response into its messages."""


def unframed(body: bytes) -> list[bytes]:
    """Returns the messages in ``body``, which must be whole and not compressed."""
    messages = []
    while body:
        end = 5 + int.from_bytes(body[1:5])
        assert body[0] == 0, body[:5]
        assert 5 <= end <= len(body), (end, len(body))
        messages.append(body[5:end])
        body = body[end:]
    return messages
