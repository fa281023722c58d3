"""What modules of a process share: collectives that end cleanly, and marks on parameters."""
