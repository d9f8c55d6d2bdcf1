"""GPUs as data: what their data sheets promise. Figures that nobody measured here."""
