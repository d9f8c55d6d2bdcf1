"""Reports of a sweep: charts on one HTML page, and the same as Markdown and PNG."""
