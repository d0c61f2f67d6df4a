r"""Cells: identity, atomic writing, refusal of what does not belong, repair of what is damaged."""

from __future__ import annotations

import json
import os
from dataclasses import asdict

import pandas as pd
import pytest
import toy_experiment as toy

from attention_dynamics.running import Cell, ForeignResults, Store, cells_of, read_results, rows_of
from attention_dynamics.running import store as store_module

FACTS = {"device": "cpu", "seconds": 0.1, "commit": None, "threads": 1, "tf32": False}
CELL = Cell("toy", 1, toy.Config(8), 0)


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path, toy.COLUMNS)


def test_a_cell_is_named_by_experiment_schema_config_and_seed():
    others = [
        Cell("other", 1, toy.Config(8), 0),
        Cell("toy", 2, toy.Config(8), 0),
        Cell("toy", 1, toy.Config(9), 0),
        Cell("toy", 1, toy.Config(8, power=-1.0), 0),
        Cell("toy", 1, toy.Config(8), 1),
    ]
    assert len({cell.key for cell in [CELL, *others]}) == 6
    assert Cell("toy", 1, toy.Config(8), 0).key == CELL.key
    assert json.loads(CELL.identity)["config"]["size"] == 8


def test_the_key_of_a_cell_never_changes_between_versions():
    # a changed hash would orphan every committed result
    assert CELL.identity == (
        '{"config":{"delay":0.0,"fails_at_seed":-1,"power":-0.5,"size":8},'
        '"experiment":"toy","schema":1,"seed":0}'
    )
    assert CELL.key == "a62492f79807d4ced52b56ba582eaf5c"  # sha256sum of the text above


def test_rows_refuse_a_value_that_is_not_finite():
    with pytest.raises(ValueError, match="quantity 'loss' is nan"):
        rows_of("toy", toy.Config(8), 0, {"loss": float("nan")})


def test_a_config_that_is_not_a_dataclass_is_refused():
    with pytest.raises(TypeError, match="frozen dataclass"):
        rows_of("toy", {"size": 8}, 0, {"loss": 1.0})


def test_duplicate_cells_are_refused():
    with pytest.raises(ValueError, match="duplicate"):
        cells_of(toy, [toy.Config(8)], [3, 3])


def test_a_saved_cell_loads_with_its_facts_and_its_exact_values(store):
    rows = toy.run(CELL.config, CELL.seed)
    store.save(CELL, rows, FACTS)
    loaded, facts = store.load(CELL)
    pd.testing.assert_frame_equal(loaded, rows, check_exact=True)
    assert facts == FACTS


def test_a_missing_cell_is_none_and_collecting_it_says_which(store):
    assert store.load(CELL) is None
    with pytest.raises(KeyError, match=r"no finished cell for toy: Config\(size=8"):
        store.collect([CELL])


@pytest.mark.parametrize("damage", ["empty", "half", "flipped value", "text"])
def test_a_damaged_cell_is_reported_and_counts_as_missing(store, damage):
    store.save(CELL, toy.run(CELL.config, CELL.seed), FACTS)
    path = store.path(CELL)
    content = bytearray(path.read_bytes())
    if damage == "empty":
        content = bytearray()
    elif damage == "half":
        content = content[: len(content) // 2]
    elif damage == "flipped value":
        value = toy.run(CELL.config, CELL.seed)["value"].to_numpy()[:1].tobytes()
        content[content.index(value)] ^= 1  # the last bit of a stored number
    else:
        content = bytearray(b"experiment,size\ntoy,8\n")
    path.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match=f"{CELL.key}.parquet is damaged"):
        assert store.load(CELL) is None


def test_rows_with_other_columns_are_refused_before_anything_is_written(store):
    rows = toy.run(CELL.config, CELL.seed).assign(extra=1.0)
    with pytest.raises(ForeignResults, match=r"'extra'.*raise the experiment's SCHEMA"):
        store.save(CELL, rows, FACTS)
    assert not store.path(CELL).exists()


def test_a_stored_cell_with_other_columns_is_refused_not_mixed(store, tmp_path):
    wider = Store(tmp_path, (*toy.COLUMNS, "extra"))
    wider.save(CELL, toy.run(CELL.config, CELL.seed).assign(extra=1.0), FACTS)
    with pytest.raises(ForeignResults, match="extra"):
        store.load(CELL)


def test_a_cell_under_the_name_of_another_is_refused(store):
    other = Cell("toy", 1, toy.Config(16), 0)
    store.save(other, toy.run(other.config, other.seed), FACTS)
    store.path(other).rename(store.path(CELL))
    with pytest.raises(ForeignResults, match='"size":16'):
        store.load(CELL)


def test_a_directory_of_another_experiment_is_refused(store):
    store.publish(toy.run(CELL.config, CELL.seed), {"experiment": "depth"})
    with pytest.raises(ForeignResults, match="'depth', not of 'toy'"):
        store.require_own("toy")


MANIFEST = {"experiment": "toy", "configs": [asdict(CELL.config)], "seeds": [0]}


def test_a_table_that_is_not_its_manifests_is_refused(store):
    store.publish(toy.run(CELL.config, 0), MANIFEST)
    frame, manifest = read_results(store.directory)
    assert manifest["experiment"] == "toy"
    pd.testing.assert_frame_equal(frame, toy.run(CELL.config, 0), check_exact=True)
    path = store.directory / store_module.TABLE_NAME
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ForeignResults, match="run the sweep again"):
        read_results(store.directory)


def test_results_that_are_not_there_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="has not finished"):
        read_results(tmp_path)


def test_only_old_leftovers_of_killed_writers_are_removed(store):
    store.cells.mkdir(parents=True)
    old, young = store.cells / ".a.1.ff.part", store.cells / ".b.2.ff.part"
    for leftover in (old, young):
        leftover.write_bytes(b"half a file")
    os.utime(old, (0, 0))
    store.remove_stale()
    assert not old.exists()
    assert young.exists()


def test_the_same_cell_gives_the_same_bytes(tmp_path):
    contents = []
    for name in ("first", "second"):
        store = Store(tmp_path / name, toy.COLUMNS)
        store.save(CELL, toy.run(CELL.config, CELL.seed), FACTS)
        contents.append(store.path(CELL).read_bytes())
    assert contents[0] == contents[1]
