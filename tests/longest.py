"""Files of tests that take long, the longest first: several processes begin with them, in this order.

`make test` prints at its end what belongs here. Files that share a Ray stand together; see ``ray_forks.py``.
"""

FILES = (
    "tests/e2e/test_placement_faults.py",
    "tests/e2e/test_ray_supervised.py",
    "tests/e2e/test_ray_placements.py",
    "tests/e2e/test_ray_driver.py",
    "tests/contracts/test_cluster_backends.py",
    "tests/contracts/test_left_batches.py",
    "tests/distributed/test_ray_faults.py",
    "tests/distributed/test_weight_sync_workers.py",
    "tests/e2e/test_bits_under_load.py",
    "tests/distributed/test_allocation.py",
    "tests/distributed/test_weight_processes.py",
    "tests/distributed/test_ray_clusters.py",
    "tests/e2e/test_examples.py",
    "tests/e2e/test_fuzz.py",
    "tests/e2e/test_resume.py",
)
