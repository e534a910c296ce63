"""Reports of a run: the verdict (verdict.py), the terminal, report.json.

May touch: runs and findings, and for files the report directory. Tests: tests/conformance/test_report_*.py.
"""
