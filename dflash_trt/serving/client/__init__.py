"""The client of a served model."""
