"""TLS: certificates, handshakes, and connections as transports over other transports."""
