"""Utilities: files, option fields, hardware, signals, progress."""
