"""What every test process needs before JAX is imported: sixteen simulated CPU devices.

May touch: the environment of the test process. Tested by: every test that builds a mesh.
"""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=16".strip()
