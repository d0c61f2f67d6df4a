r"""Running experiments: resumable sweeps over (configuration, seed), and the store of their cells.

This subpackage knows an experiment only by its shape, that of
:class:`attention_dynamics.experiments.shape.Experiment`: it imports neither models nor theory, so
that any module of that shape can be swept.
"""

from attention_dynamics.experiments.shape import Cell, Experiment, cells_of, rows_of
from attention_dynamics.running.agreement import ForeignResults
from attention_dynamics.running.manifest import read_manifest
from attention_dynamics.running.store import Store, read_results, stored_results
from attention_dynamics.running.sweep import sweep
from attention_dynamics.running.verify import verify_results
from attention_dynamics.running.workers import (
    CellFailed,
    WorkersLost,
    dask_executor,
    process_pool,
)

__all__ = [
    "Cell",
    "CellFailed",
    "Experiment",
    "ForeignResults",
    "Store",
    "WorkersLost",
    "cells_of",
    "dask_executor",
    "process_pool",
    "read_manifest",
    "read_results",
    "rows_of",
    "stored_results",
    "sweep",
    "verify_results",
]
