"""Evidence about a server that others run: its answers compared, its acceptance, what moves it."""
