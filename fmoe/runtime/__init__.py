"""Process-wide helpers: collectives that end cleanly at exit, and marks on parameters."""
