"""Settings of every test: one thread, reproducible property tests, no noise from torch itself."""

import warnings

import pytest
import torch
from hypothesis import settings

with warnings.catch_warnings():
    # The first forward-mode derivative of a process makes torch script its own decompositions,
    # which torch itself deprecates; loading them here keeps every other warning an error.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

settings.register_profile("reproducible", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("reproducible")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
