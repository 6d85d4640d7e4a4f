"""The report of a run: the paper's tables and figures from a run directory, as markdown and HTML."""
