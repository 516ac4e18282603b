"""One file per op; a new file that defines `CASE` is found by itself."""

from __future__ import annotations

import importlib
import pkgutil

from ..model import Case


def find() -> dict[str, Case]:
    """All cases by op name, in the order in which `all` runs them."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    cases = [importlib.import_module(f"{__name__}.{name}").CASE for name in names]
    return {case.op: case for case in sorted(cases, key=lambda case: case.unit)}
