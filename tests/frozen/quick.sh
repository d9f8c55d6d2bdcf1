#!/bin/sh
# The frozen graphs alone, a few seconds: before a change goes anywhere.
exec "${PYTHON:-.venv/bin/python}" -m pytest -q -x tests/frozen/test_frozen.py -k test_graphs
