"""Fixtures: ranks that are shared by all tests of a session.

A test runs on processes ("shm"), and on the other backends that its marker names, as in
`@pytest.mark.backends("local", "cuda")`; that of a function replaces that of its module. With
`--backend cuda` only the tests on that backend run.
"""

from __future__ import annotations

import pytest
from harness import BACKENDS, RankPool, missing_backends, run_fresh, values

# World sizes by fixture and backend.
WORLDS = {
    "run": {
        "shm": (1, 2, 3, 4, 5),
        "local": (3,),
        "emulated": (1, 2, 3),
        "cuda": (1, 2, 4, 8),
    },
    "run_few": {"shm": (2, 3), "local": (2,), "emulated": (2, 3), "cuda": (2, 3)},
    "run_pair": dict.fromkeys(BACKENDS, (2,)),
}


def pytest_addoption(parser):
    parser.addoption(
        "--backend", choices=BACKENDS, help="only the tests that run on ranks of this backend"
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers", f"backends(*names): where a test runs beside shm; of {', '.join(BACKENDS[1:])}"
    )


def pytest_report_header(config):
    missing = missing_backends()
    lines = [f"backends: {', '.join(name for name in BACKENDS if name not in missing)}"]
    return lines + [f"not run on {name}: {reason}" for name, reason in missing.items()]


def pytest_collection_modifyitems(config, items):
    chosen = config.getoption("--backend")
    if chosen is None:
        return
    if chosen in missing_backends():
        raise pytest.UsageError(f"--backend {chosen}: {missing_backends()[chosen]}")
    others = [item for item in items if _backend_of(item) != chosen]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _backend_of(item) == chosen]


def _backend_of(item):
    """The backend whose ranks the test gets from a fixture, or None."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for fixture in (*WORLDS, "on_ranks", "run_sixteen"):
        if fixture in parameters:
            value = parameters[fixture]
            return value[0] if isinstance(value, tuple) else value
    return None


def pytest_generate_tests(metafunc):
    marker = metafunc.definition.get_closest_marker("backends")
    named = ("shm", *(marker.args if marker else ()))
    missing = missing_backends()
    backends = [name for name in BACKENDS if name in named and name not in missing]
    for fixture in ("on_ranks", "run_sixteen"):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, backends, indirect=True)
    for fixture, worlds in WORLDS.items():
        if fixture in metafunc.fixturenames:
            cases = [(name, world_size) for name in backends for world_size in worlds[name]]
            ids = [f"{name}-world{world_size}" for name, world_size in cases]
            metafunc.parametrize(fixture, cases, ids=ids, indirect=True)


@pytest.fixture(scope="session")
def pools():
    """The pools of ranks by backend."""
    pools = {name: RankPool(name) for name in BACKENDS}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture(scope="session")
def pool(pools):
    """Ranks that are processes."""
    return pools["shm"]


@pytest.fixture
def on_ranks(pools, request):
    """Ranks of one of the test's backends, for world sizes of its own choice."""
    return pools[request.param]


class Run:
    """run(function, *arguments): on every rank; values by rank."""

    def __init__(self, pool, world_size):
        self.pool, self.world_size = pool, world_size

    def __call__(self, function, *arguments):
        __tracebackhide__ = True
        return self.pool.run(self.world_size, function, *arguments)


def _run(pools, request):
    backend, world_size = request.param
    return Run(pools[backend], world_size)


@pytest.fixture
def run(pools, request):
    """run(function, *arguments): for world sizes from 1 to 5."""
    return _run(pools, request)


@pytest.fixture
def run_few(pools, request):
    """Like `run`, for world sizes 2 and 3."""
    return _run(pools, request)


@pytest.fixture
def run_pair(pools, request):
    """Like `run`, for two ranks."""
    return _run(pools, request)


@pytest.fixture
def run_sixteen(pools, request):
    """Like `run`, for 16 ranks."""
    if request.param == "shm":  # too many processes to keep
        return lambda function, *arguments: values(run_fresh(16, function, *arguments))
    return Run(pools[request.param], 16)


@pytest.fixture(params=[1, 2, 3, 4, 5], ids="world{}".format)
def world_size(request):
    return request.param
