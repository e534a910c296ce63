"""One process a host: each makes its own shards, checks its own shards, and none holds a whole array.

`host` runs in every process, with JAX; `launch` starts the processes on one machine, `merging` makes one result of what
they found.
Tests: tests/conformance/test_hosts_*.py.
"""
