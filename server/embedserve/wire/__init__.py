"""Network protocols: connections, HTTP/1, HTTP/2 and gRPC. Handles bytes and statuses, not ids."""
