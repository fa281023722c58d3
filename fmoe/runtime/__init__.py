"""Process-wide helpers: collectives that end cleanly at exit, marks on parameters, and PEFT's adapters."""
