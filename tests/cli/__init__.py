"""Tests of the command line, through `main` as a user meets it."""
