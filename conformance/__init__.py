"""Holds any attention under context parallelism against the oracle. Importing this package imports no JAX.

The public face for adapters: `Declined`, `Problem`, `Case`. Tests: tests/conformance.
"""

from conformance.case_text import case_from_json, case_to_json, format_case, parse_case
from conformance.problem import Case, Document, InvalidCase, Problem
from conformance.target import Declined

__all__ = [
    "Case",
    "Declined",
    "Document",
    "InvalidCase",
    "Problem",
    "case_from_json",
    "case_to_json",
    "format_case",
    "parse_case",
]
