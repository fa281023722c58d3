"""FastMoE's public API (1.1) over the layer of this package; docs/migration.md tells what differs."""
