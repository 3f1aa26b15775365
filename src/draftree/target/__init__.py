"""The target model: its names, its weights, and prefill, verification and commit."""
