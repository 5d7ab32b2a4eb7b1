"""The wire: connections, HTTP/1, HTTP/2 and gRPC. It knows bytes and statuses, not ids."""
