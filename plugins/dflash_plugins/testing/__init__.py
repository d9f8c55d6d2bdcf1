"""What tests and the check on a GPU share: guarded memory, a measure of error, an interpreter."""
