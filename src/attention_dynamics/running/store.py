r"""The store of a sweep: one small Parquet file a cell, written atomically, never mixed.

A directory holds one sweep::

    cells/<key>.parquet    finished cells, one file each
    table.parquet          all cells of the last finished sweep, in the order of the sweep
    manifest.json          where the table comes from, and what it says of each band

A file appears under its name only when it is complete, so a process killed at any moment loses at
most the cells it was computing. A cell that is there is never written again: of two processes that
finish it, the second takes the numbers of the first, and both end with the same table. The
manifest names its table by a hash; one that was killed between the two is read all the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attention_dynamics.experiments.shape import Cell, Experiment
from attention_dynamics.running.agreement import ForeignResults, require_cells, require_source
from attention_dynamics.running.files import (
    create_atomically,
    exclusively,
    flush_directory,
    remove_stale,
    write_atomically,
)
from attention_dynamics.running.manifest import MANIFEST_NAME, read_manifest

FORMAT = 1  # of the files, not of what the rows mean: that is the experiment's SCHEMA
TABLE_NAME = "table.parquet"
RESULTS = "results"

Content = tuple[pd.DataFrame, dict[str, Any]]


class Store:
    """The cells of one experiment in one directory.

    Parameters
    ----------
    directory
        Created on the first write.
    columns
        The columns of every cell, in order; a cell with others is refused.

    """

    def __init__(self, directory: str | Path, columns: Sequence[str]) -> None:
        self.directory = Path(directory)
        self.cells = self.directory / "cells"
        self.columns = tuple(columns)

    def path(self, cell: Cell) -> Path:
        """Where the cell is or will be."""
        return self.cells / f"{cell.key}.parquet"

    def save(self, cell: Cell, frame: pd.DataFrame, facts: Mapping[str, Any]) -> Content:
        """Write one finished cell atomically; ``facts`` (device, seconds) travel with it.

        Returns what the store holds from now on: these rows, or those of another process that
        finished the same cell before.
        """
        self._require_columns(frame.columns, f"rows of {cell}")
        table = _as_table(frame)
        described = table.replace_schema_metadata(
            {
                **(table.schema.metadata or {}),
                b"format": str(FORMAT).encode(),
                b"identity": cell.identity.encode(),
                b"digest": _digest(table).encode(),
                b"facts": json.dumps(dict(facts), sort_keys=True).encode(),
            }
        )
        content = _parquet_bytes(described)
        if not create_atomically(self.path(cell), content):
            earlier = self._read(cell)
            if not isinstance(earlier, str):
                return earlier
            write_atomically(self.path(cell), content)
        return frame, dict(facts)

    def load(self, cell: Cell) -> Content | None:
        """One finished cell and its facts, or None if it has still to be computed.

        A file that cannot be read, or whose content does not match the digest written with it, is
        reported by a warning and counts as missing, so that a sweep computes it again.
        Raises ForeignResults if a sound file is of another cell or has other columns.
        """
        found = self._read(cell)
        if not isinstance(found, str):
            return found
        if found == "damaged":
            warnings.warn(f"{self.path(cell)} is damaged; its cell is computed again", stacklevel=2)
        return None

    def collect(self, cells: Sequence[Cell]) -> pd.DataFrame:
        """All given cells in one frame, in the given order. Raises KeyError naming one missing."""
        frames = []
        for cell in cells:
            loaded = self.load(cell)
            if loaded is None:
                raise KeyError(f"no finished cell for {cell} under {self.cells}; run the sweep")
            frames.append(loaded[0])
        return concatenate(frames, self.columns)

    def publish(self, frame: pd.DataFrame, manifest: Mapping[str, Any]) -> None:
        """Write the table and its manifest; killed at any moment, old or new ones can be read."""
        content = _parquet_bytes(_as_table(frame))
        digest = hashlib.sha256(content).hexdigest()
        pending = _pending(self.directory, digest)
        with exclusively(self.directory):
            write_atomically(pending, content)
            write_manifest(self.directory, {**manifest, "table_sha256": digest})
            os.replace(pending, self.directory / TABLE_NAME)
            flush_directory(self.directory)

    def require_own(self, experiment: str, schema: int | None = None) -> None:
        """Refuse a directory whose manifest is of another experiment, or of a newer source."""
        path = self.directory / MANIFEST_NAME
        if not path.exists():
            return
        found = read_manifest(path)
        if (owner := found.get("experiment")) != experiment:
            raise ForeignResults(
                f"{self.directory} holds results of {owner!r}, not of {experiment!r}; "
                "choose another directory"
            )
        if schema is not None and found.get("schema", schema) > schema:
            raise ForeignResults(
                f"{self.directory} holds results of schema {found['schema']} of {experiment!r}, "
                f"this source has schema {schema}; update it, or choose another directory"
            )

    def remove_stale(self) -> None:
        """Remove what killed writers left behind; young files may still be being written."""
        for folder, pattern in (
            (self.cells, ".*.part"),
            (self.directory, ".*.part"),
            (self.directory, ".*.pending"),
        ):
            remove_stale(folder, pattern)

    def _read(self, cell: Cell) -> Content | str:
        """The cell, or "missing" or "damaged"."""
        path = self.path(cell)
        try:
            table = pq.read_table(path, memory_map=False)
            metadata = table.schema.metadata or {}
            if metadata[b"digest"].decode() != _digest(table):
                return "damaged"
            facts = json.loads(metadata[b"facts"])
            identity = metadata[b"identity"].decode()
        except FileNotFoundError:
            return "missing"
        except (OSError, pa.ArrowException, KeyError, ValueError):
            return "damaged"
        if identity != cell.identity:
            raise ForeignResults(
                f"{path} holds {identity}, not {cell.identity}; "
                "give every sweep a directory of its own"
            )
        self._require_columns(table.column_names, str(path))
        return _as_frame(table), facts

    def _require_columns(self, found: Sequence[str], where: str) -> None:
        if tuple(found) != self.columns:
            raise ForeignResults(
                f"{where} has the columns {tuple(found)}, this experiment has {self.columns}; "
                "raise the experiment's SCHEMA when its rows change, or use a new directory"
            )


def read_results(directory: str | Path, experiment: Experiment | None = None) -> Content:
    """The table and the manifest of a finished sweep.

    The table has to be the one its manifest names, and to hold exactly the cells (configurations
    times seeds) that the manifest lists. With ``experiment``, the source: schema, columns and the
    cells of a named profile have to be those of the source too, so that no number comes from a
    smaller profile than its name says.

    Raises FileNotFoundError if the sweep has not finished; ForeignResults if table, manifest and
    source do not belong together, saying in what they differ.
    """
    folder = Path(directory)
    for _ in range(3):  # between the two files another process may publish
        manifest = read_manifest(folder / MANIFEST_NAME)
        content = _table_bytes(folder, manifest["table_sha256"])
        if content is not None:
            break
    else:
        raise ForeignResults(
            f"{folder / TABLE_NAME} is not the table its manifest describes; run the sweep again, "
            "which rebuilds both from the finished cells"
        )
    frame = _as_frame(pq.read_table(pa.BufferReader(content)))
    require_cells(frame, manifest, str(folder))
    if experiment is not None:
        require_source(frame, manifest, experiment, str(folder))
    return frame, manifest


def stored_results(
    experiment: str | Experiment, profile: str, *, results: str | Path | None = None
) -> Content:
    """The table and the manifest of a result that is stored with the sources.

    ``experiment`` is a name, or the module itself; they are read by :func:`read_results` against
    the source. ``results`` is the folder of all results: by default that of the repository.

    Raises FileNotFoundError saying what to run if there is no such result.
    """
    from attention_dynamics import experiments

    source = experiments.get(experiment) if isinstance(experiment, str) else experiment
    folder = Path(results or Path(__file__).resolve().parents[3] / RESULTS) / source.NAME / profile
    if not (folder / MANIFEST_NAME).exists():
        raise FileNotFoundError(
            f"no stored results in {folder}; in the repository's folder run "
            f"attention-dynamics run {source.NAME} --profile {profile}"
        )
    return read_results(folder, source)


def write_manifest(directory: Path, manifest: Mapping[str, Any]) -> None:
    """Write the manifest of a directory atomically."""
    text = json.dumps(dict(manifest), indent=2, allow_nan=False)
    write_atomically(directory / MANIFEST_NAME, text.encode() + b"\n")


def concatenate(frames: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Frames below one another, by way of Arrow: stored and fresh cells give equal tables."""
    if not frames:
        return pd.DataFrame(columns=list(columns))
    tables = [_as_table(frame).replace_schema_metadata(None) for frame in frames]
    return _as_frame(pa.concat_tables(tables, promote_options="permissive").combine_chunks())


def _pending(directory: Path, digest: str) -> Path:
    """Where a table waits while its manifest is written."""
    return directory / f".{digest[:32]}.pending"


def _table_bytes(directory: Path, digest: str) -> bytes | None:
    """The table of that hash: in its place, or still waiting beside it."""
    for path in (directory / TABLE_NAME, _pending(directory, digest)):
        if path.exists() and hashlib.sha256(content := path.read_bytes()).hexdigest() == digest:
            return content
    return None


def _as_table(frame: pd.DataFrame) -> pa.Table:
    """A frame as an Arrow table; the index is dropped."""
    return pa.Table.from_pandas(frame, preserve_index=False)


def _as_frame(table: pa.Table) -> pd.DataFrame:
    """An Arrow table as a frame without leftovers of how it was stored."""
    return table.to_pandas()


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _digest(table: pa.Table) -> str:
    # over the values, not the file: it stays the same when pyarrow changes how it writes
    content = json.dumps(table.to_pydict(), separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
