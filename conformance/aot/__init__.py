"""Targets compiled for TPUs that are not there: what they send, what hides it, how much memory it takes.

`job` and `program` run in a process of their own, with JAX and libtpu; `command` judges and prints.
Tests: tests/conformance/test_aot_*.py.
"""
