"""Adapters: the bundled implementations and others' kernels as targets, one a file.

May touch: JAX and what each adapts; never the oracle. Tests: tests/conformance/test_targets.py.
"""
