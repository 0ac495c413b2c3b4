"""Bytes between processes: addresses, dialing, TLS, handshakes, messages, heartbeats, and measurements of links."""
