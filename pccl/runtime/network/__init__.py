"""Bytes between processes: addresses, dialing, TLS, framing, handshakes, heartbeats and measuring."""
