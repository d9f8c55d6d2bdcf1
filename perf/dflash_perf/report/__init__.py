"""A sweep's results for people: charts, one page of HTML, the same as Markdown and PNG."""
