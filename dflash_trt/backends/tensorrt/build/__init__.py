"""Engines built ahead of time from the bundle's own graphs; no GPU is needed to build one."""
