"""One module per command of the command line; each has a `command`."""
