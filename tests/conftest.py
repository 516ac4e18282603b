"""Fixtures: ranks that are shared by all tests of a session."""

from __future__ import annotations

import pytest
from harness import RankPool


@pytest.fixture(scope="session")
def pool():
    pool = RankPool()
    yield pool
    pool.close()


@pytest.fixture(params=[1, 2, 3, 4, 5], ids="world{}".format)
def world_size(request):
    return request.param


@pytest.fixture
def run(pool, world_size):
    """run(function, *arguments): on every rank of a world size from 1 to 5; values by rank."""
    return lambda function, *arguments: pool.run(world_size, function, *arguments)


@pytest.fixture(params=[2, 3], ids="world{}".format)
def run_few(pool, request):
    """Like `run`, for world sizes 2 and 3."""
    return lambda function, *arguments: pool.run(request.param, function, *arguments)


@pytest.fixture
def run_pair(pool):
    """Like `run`, for two ranks."""
    return lambda function, *arguments: pool.run(2, function, *arguments)
