"""Code that several scripts of benchmarks share. The package `draftree` never imports it."""
