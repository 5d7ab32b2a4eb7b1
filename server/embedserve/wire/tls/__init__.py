"""TLS: certificates, handshakes, and an asyncio transport layered over a raw transport."""
