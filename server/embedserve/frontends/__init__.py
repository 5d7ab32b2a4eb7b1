"""Frontends: each owns a wire protocol, hands bytes to a codec, and maps errors to statuses."""
