"""Corpora that drafters without training search: read, tokenised, and kept in a folder."""
