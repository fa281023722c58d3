"""The native CPU backend (docs/native.md): `loader` builds and loads it, `ops` has its operations."""
