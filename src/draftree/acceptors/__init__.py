"""Rules that keep what the target itself would have written."""
