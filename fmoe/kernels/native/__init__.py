"""Native CPU backend (docs/native.md): `loader` builds and loads it, `ops` wraps its operations."""
