"""Tests with vLLM and Ray, which need an environment of their own: `make test-engines`."""

import os

import pytest

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))  # of vLLM, Ray and what they import
