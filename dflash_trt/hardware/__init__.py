"""GPUs: what their data sheets promise, as data nobody measured here, and the one that is here."""
