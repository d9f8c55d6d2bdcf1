"""What DFlash 2 adds to a draft's graph."""
