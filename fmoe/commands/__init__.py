"""Commands of the fmoe command line."""
