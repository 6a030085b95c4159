"""Which optimizer fits a dataset: a table of measured tasks, a model of it, and its evaluation."""
