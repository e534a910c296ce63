"""Races of kernels that copy by themselves: TPU interpret mode with its race detector, and what it tells.

`interpreter` is the one file that knows JAX's interpreter, `program` runs a target under it, `check/races.py` judges;
`planted` holds kernels with known races, and their clean twins. Tests: tests/conformance/test_races_*.py.
"""
