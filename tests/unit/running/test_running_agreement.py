r"""A stored table holds the cells its manifest lists, and those are the named profile's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import banded_experiment as banded
import pandas as pd
import pytest

from attention_dynamics.experiments.estimates import Profile
from attention_dynamics.running import ForeignResults, Store, read_results, stored_results, sweep
from attention_dynamics.running.store import write_manifest


def source(**changes):
    names = ("NAME", "SCHEMA", "COLUMNS", "PROFILES", "BANDS", "run", "summarise")
    return SimpleNamespace(**{**{name: getattr(banded, name) for name in names}, **changes})


@pytest.fixture
def folder(tmp_path):
    sweep(banded, "book", directory=tmp_path)
    return tmp_path


def edit(folder, **changes):
    path = folder / "manifest.json"
    write_manifest(folder, json.loads(path.read_text()) | changes)


def test_sound_results_are_read_with_and_without_the_source(folder):
    expected = sweep(banded, "book")
    for experiment in (None, banded):
        frame, manifest = read_results(folder, experiment)
        pd.testing.assert_frame_equal(frame, expected, check_exact=True)
        assert manifest["profile"] == "book"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": [0, 1, 2]}, "3 of the table are not in the manifest"),
        ({"seeds": [0, 1, 2, 3, 4]}, "3 of the manifest are not in the table"),
        ({"configs": [{"size": 8, "rate": None, "law": "iid", "wide": False}]}, "8 of the table"),
        ({"configs": []}, "lists no configs and seeds"),
        ({"experiment": "other"}, "the manifest is of 'other'"),
    ],
)
def test_a_table_without_exactly_the_cells_of_its_manifest_is_refused(folder, change, message):
    edit(folder, **change)
    with pytest.raises(ForeignResults, match=message):
        read_results(folder)


def test_a_changed_field_of_a_configuration_is_seen(folder):
    configs = json.loads((folder / "manifest.json").read_text())["configs"]
    for field, value in (("rate", 0.25), ("law", "shared"), ("wide", True)):
        changed = [*configs[:1], configs[1] | {field: value}, *configs[2:]]
        edit(folder, configs=changed)
        with pytest.raises(ForeignResults, match=r"4 of the table .* 4 of the manifest"):
            read_results(folder)


def test_a_smaller_table_under_the_name_of_a_profile_is_refused(tmp_path):
    small = source(PROFILES={"book": Profile(banded.PROFILES["book"].configs[:2], seeds=(0, 1))})
    sweep(small, "book", directory=tmp_path)
    read_results(tmp_path)
    with pytest.raises(ForeignResults, match=r"profile 'book' of the source has drifted .*1 conf"):
        read_results(tmp_path, banded)
    with pytest.raises(ForeignResults, match="attention-dynamics run banded --profile book again"):
        read_results(tmp_path, banded)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SCHEMA": 3}, "schema of the stored results is 2, of the source 3"),
        ({"NAME": "other"}, "experiment of the stored results is 'banded', of the source 'other'"),
        ({"COLUMNS": (*banded.COLUMNS, "run")}, "columns of the stored results"),
        ({"PROFILES": {}}, "profile 'book', which the source does not have"),
        (
            {"PROFILES": {"book": Profile(banded.PROFILES["book"].configs, seeds=(0, 1, 2, 9))}},
            "1 seeds are in the manifest only .* 1 seeds are in the source only",
        ),
    ],
)
def test_a_source_that_has_drifted_is_refused(folder, changes, message):
    with pytest.raises(ForeignResults, match=message):
        read_results(folder, source(**changes))


@pytest.mark.parametrize(("arguments"), [{"seeds": [0, 1]}, {"configs": [banded.Config(8)]}])
def test_a_sweep_that_is_not_its_profile_is_called_custom(tmp_path, arguments):
    sweep(banded, "book", directory=tmp_path, **arguments)
    assert read_results(tmp_path, banded)[1]["profile"] == "custom"
    sweep(banded, "book", directory=tmp_path)
    assert read_results(tmp_path, banded)[1]["profile"] == "book"


def test_the_table_of_a_killed_writer_is_read_from_where_it_waits(folder):
    frame, _ = read_results(folder)
    digest = json.loads((folder / "manifest.json").read_text())["table_sha256"]
    (folder / "table.parquet").rename(folder / f".{digest[:32]}.pending")
    pd.testing.assert_frame_equal(read_results(folder)[0], frame)


def test_a_sweep_refuses_the_results_of_a_newer_source_and_replaces_those_of_an_older(folder):
    with pytest.raises(ForeignResults, match=r"schema 2 of 'banded', this source has schema 1"):
        sweep(source(SCHEMA=1), "book", directory=folder)
    newer = source(SCHEMA=3)
    sweep(newer, "book", directory=folder)
    assert read_results(folder, newer)[1]["schema"] == 3


def test_a_store_without_a_manifest_is_anyones(tmp_path):
    Store(tmp_path, banded.COLUMNS).require_own("banded", 1)


def test_stored_results_are_found_by_name_or_module_and_read_against_the_source(tmp_path):
    sweep(banded, "smoke", directory=tmp_path / "banded" / "smoke")
    frame, manifest = stored_results(banded, "smoke", results=tmp_path)
    assert len(frame) == 12
    assert manifest["profile"] == "smoke"
    with pytest.raises(FileNotFoundError, match="attention-dynamics run banded --profile book"):
        stored_results(banded, "book", results=tmp_path)
    with pytest.raises(ForeignResults, match="drifted"):
        stored_results(source(PROFILES={"smoke": Profile((banded.Config(8),), (0,))}), "smoke",
                       results=tmp_path)  # fmt: skip
    with pytest.raises(ValueError, match="experiment must be one of"):
        stored_results("banded", "smoke", results=tmp_path)


def test_the_results_of_the_repository_are_the_default():
    frame, manifest = stored_results("population_limit", "book")
    assert manifest["experiment"] == "population_limit"
    assert set(frame["seed"]) == set(manifest["seeds"])
