"""Figures and tables, drawn from rows and verdicts alone."""
