"""Communication between processes: addresses, dialing, TLS, handshakes, messages, heartbeats, link measurements."""
