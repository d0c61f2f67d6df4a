r"""The store of a sweep: one small Parquet file a cell, written atomically, never mixed.

A directory holds one sweep::

    cells/<key>.parquet    finished cells, one file each
    table.parquet          all cells of the last finished sweep, in the order of the sweep
    manifest.json          where the table comes from

A file appears under its name only when it is complete: it is written beside its place, flushed
to the disk, renamed, and the directory is flushed. A process killed at any moment therefore loses
at most the cells it was computing.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from attention_dynamics.experiments.shape import Cell
from attention_dynamics.running.manifest import MANIFEST_NAME, read_manifest

FORMAT = 1  # of the files, not of what the rows mean: that is the experiment's SCHEMA
TABLE_NAME = "table.parquet"
_STALE_SECONDS = 3600.0


class ForeignResults(ValueError):
    """A file in the store belongs to another experiment, or has other columns; nothing is mixed."""


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

    def save(self, cell: Cell, frame: pd.DataFrame, facts: Mapping[str, Any]) -> None:
        """Write one finished cell atomically; ``facts`` (device, seconds) travel with it."""
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
        write_atomically(self.path(cell), _parquet_bytes(described))

    def load(self, cell: Cell) -> tuple[pd.DataFrame, dict[str, Any]] | None:
        """One finished cell and its facts, or None if it has still to be computed.

        A file that cannot be read, or whose content does not match the digest written with it, is
        reported by a warning and counts as missing, so that a sweep computes it again.
        Raises ForeignResults if a sound file is of another cell or has other columns.
        """
        path = self.path(cell)
        try:
            table = pq.read_table(path, memory_map=False)
            metadata = table.schema.metadata or {}
            sound = metadata[b"digest"].decode() == _digest(table)
            facts = json.loads(metadata[b"facts"])
        except FileNotFoundError:
            return None
        except (OSError, pa.ArrowException, KeyError, ValueError):
            sound, facts, metadata, table = False, {}, {}, None
        if not sound:
            warnings.warn(f"{path} is damaged; its cell is computed again", stacklevel=2)
            return None
        if metadata[b"identity"].decode() != cell.identity:
            raise ForeignResults(
                f"{path} holds {metadata[b'identity'].decode()}, not {cell.identity}; "
                "give every sweep a directory of its own"
            )
        self._require_columns(table.column_names, str(path))
        return _as_frame(table), facts

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
        """Write the table and its manifest, each atomically, the manifest last."""
        content = _parquet_bytes(_as_table(frame))
        write_atomically(self.directory / TABLE_NAME, content)
        text = json.dumps(
            {**manifest, "table_sha256": hashlib.sha256(content).hexdigest()}, indent=2
        )
        write_atomically(self.directory / MANIFEST_NAME, text.encode() + b"\n")

    def require_own(self, experiment: str) -> None:
        """Refuse a directory whose manifest is of another experiment."""
        path = self.directory / MANIFEST_NAME
        if path.exists() and (owner := read_manifest(path).get("experiment")) != experiment:
            raise ForeignResults(
                f"{self.directory} holds results of {owner!r}, not of {experiment!r}; "
                "choose another directory"
            )

    def remove_stale(self) -> None:
        """Remove what killed writers left behind; young files may still be being written."""
        for leftover in self.cells.glob(".*.part"):
            if time.time() - leftover.stat().st_mtime > _STALE_SECONDS:
                leftover.unlink(missing_ok=True)

    def _require_columns(self, found: Sequence[str], where: str) -> None:
        if tuple(found) != self.columns:
            raise ForeignResults(
                f"{where} has the columns {tuple(found)}, this experiment has {self.columns}; "
                "raise the experiment's SCHEMA when its rows change, or use a new directory"
            )


def read_results(directory: str | Path) -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table and the manifest of a finished sweep.

    Raises FileNotFoundError if the sweep has not finished; :class:`ForeignResults` if table
    and manifest do not belong together.
    """
    path = Path(directory) / TABLE_NAME
    manifest = read_manifest(Path(directory) / MANIFEST_NAME)
    content = path.read_bytes()
    if hashlib.sha256(content).hexdigest() != manifest["table_sha256"]:
        raise ForeignResults(
            f"{path} is not the table its manifest describes; run the sweep again, "
            "which rebuilds both from the finished cells"
        )
    return _as_frame(pq.read_table(pa.BufferReader(content))), manifest


def _as_table(frame: pd.DataFrame) -> pa.Table:
    """A frame as an Arrow table; the index is dropped."""
    return pa.Table.from_pandas(frame, preserve_index=False)


def _as_frame(table: pa.Table) -> pd.DataFrame:
    """An Arrow table as a frame without leftovers of how it was stored."""
    return table.to_pandas()


def concatenate(frames: Sequence[pd.DataFrame], columns: Sequence[str]) -> pd.DataFrame:
    """Frames below one another, by way of Arrow: stored and fresh cells give equal tables."""
    if not frames:
        return pd.DataFrame(columns=list(columns))
    tables = [_as_table(frame).replace_schema_metadata(None) for frame in frames]
    return _as_frame(pa.concat_tables(tables, promote_options="permissive").combine_chunks())


def write_atomically(path: Path, content: bytes) -> None:
    """Write beside the place, flush, rename over it, flush the directory."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.parent / f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.part"
    try:
        with open(part, "xb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _parquet_bytes(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink)
    return sink.getvalue().to_pybytes()


def _digest(table: pa.Table) -> str:
    # over the values, not the file: it stays the same when pyarrow changes how it writes
    content = json.dumps(table.to_pydict(), separators=(",", ":"))
    return hashlib.sha256(content.encode()).hexdigest()
