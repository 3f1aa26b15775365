"""Loops over arrays, in C++ where the extension is built."""
