"""What every test process needs before JAX and NumPy are imported.

May touch: the environment of the test process. Tested by: every test that builds a mesh.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()
# One test process a core (pytest -n auto): BLAS threads of several processes that wait for each other cost tenfold.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
