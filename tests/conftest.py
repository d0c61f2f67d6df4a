"""Settings of every test: one thread, reproducible property tests, no noise from torch itself."""

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from playwright.sync_api import Browser

from attention_dynamics.models.engines import native
from tools.browse import HOW_TO_GET_CHROMIUM, find_chromium, open_browser

with warnings.catch_warnings():
    # The first forward-mode derivative of a process makes torch script its own decompositions,
    # which torch itself deprecates; loading them here keeps every other warning an error.
    warnings.simplefilter("ignore", DeprecationWarning)
    import torch._decomp.decompositions_for_jvp

settings.register_profile("reproducible", deadline=None, derandomize=True, max_examples=40)
settings.load_profile("reproducible")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--engine", help="the engine that 'auto' stands for in this run")


def pytest_configure(config: pytest.Config) -> None:
    engine = config.getoption("--engine")
    if engine:  # the environment, so that processes started by a test take it too
        os.environ["ATTENTION_DYNAMICS_ENGINE"] = engine


@pytest.hookimpl(tryfirst=True)  # before the fixtures, which build the kernels
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("compiler") and native.compiler() is None:
        message = "the C++ kernels need a compiler: c++, g++ or clang++ on the PATH, or CXX"
        if os.environ.get("REQUIRE_COMPILER") == "1":
            pytest.fail(message)
        pytest.skip(message)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser a process, whoever asks: Playwright refuses to be started twice in one."""
    if find_chromium() is None:
        message = f"browser tests need a browser: {HOW_TO_GET_CHROMIUM}"
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(message)
        pytest.skip(message)
    with open_browser() as chromium:
        yield chromium
