"""The run file: reading, refusing, writing (pure; no torch, MPI or HDF5)."""

import math
import string
import tomllib
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidp import config, toml
from mpidp.config import DataSection, ModelSection, RunConfig
from mpidp.errors import ConfigError
from mpidp.validate import validate

VALID = RunConfig(data=DataSection(train=("a.h5",)), model=ModelSection("mlp"))

plain = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | st.text()
values = plain | st.lists(plain | st.lists(plain, max_size=3), max_size=4)
names = st.text(string.ascii_letters + "_", min_size=1)


def test_absent_keys_keep_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[data]\ntrain = ["a.h5"]\n[optimizer]\nlr = 1\n')
    loaded = config.load(tmp_path / "run.toml")
    assert loaded.data.train == ("a.h5",)
    assert loaded.optimizer.lr == 1.0
    assert type(loaded.optimizer.lr) is float
    assert replace(loaded, data=DataSection(), optimizer=config.OptimizerSection()) == RunConfig()


def test_one_file_may_be_a_plain_string() -> None:
    assert config.from_dict({"data": {"train": "a.h5"}}).data.train == ("a.h5",)


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"data": {"globl_batch": 1}}, ["'globl_batch'", "[data]", "'global_batch'", "mixing_chunks"]),
        ({"trian": {}}, ["'trian'", "top level", "'train'", "checkpoint"]),
        ({"epochs": 3}, ["'epochs'", "top level", "[train]"]),
        ({"data": {"global_batch": "64"}}, ["data.global_batch", "'64'", "an integer"]),
        ({"data": {"global_batch": 64.0}}, ["data.global_batch", "64.0", "an integer"]),
        ({"data": {"global_batch": True}}, ["data.global_batch", "True", "an integer"]),
        ({"data": {"train": [1]}}, ["data.train", "[1]", "list of strings"]),
        ({"data": {"shuffle": "stream"}}, ["data.shuffle", "'stream'", "'full', 'none'", "mean 'streams'"]),
        ({"data": 3}, ["data = 3", "a table"]),
        ({"optimizer": {"lr": False}}, ["optimizer.lr", "False", "a number"]),
        ({"model": {"arguments": {"inner": {"a": 1}}}}, ["model.arguments.inner", "{'a': 1}"]),
        ({"model": {"arguments": [1]}}, ["model.arguments", "[1]", "a table"]),
        ({"run": {"seed": 2**63}}, ["run.seed", "64 bits"]),
    ],
)
def test_a_wrong_entry_is_refused_by_name(table: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        config.from_dict(table, "run.toml")
    assert str(caught.value).startswith("run.toml: ")
    for part in expected:
        assert part in str(caught.value)


def test_bad_syntax_names_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[data]\ntrain = \n")
    with pytest.raises(ConfigError, match=rf"{path}.*line 2"):
        config.load(path)


def test_a_missing_file_is_named_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "digits.toml").touch()
    with pytest.raises(ConfigError, match=r"digit\.toml: no such file.*mean 'digits\.toml'"):
        config.load(tmp_path / "digit.toml")
    with pytest.raises(ConfigError, match="holds no TOML file"):
        config.load(tmp_path / "empty" / "run.toml")


def test_what_is_not_a_text_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        config.load(tmp_path)
    (tmp_path / "data.h5").write_bytes(b"\x89HDF\r\n")
    with pytest.raises(ConfigError, match=r"data\.h5: not UTF-8"):
        config.load(tmp_path / "data.h5")


def test_defaults_are_valid_once_data_and_model_are_named() -> None:
    validate(VALID)
    with pytest.raises(ConfigError) as caught:
        validate(RunConfig())
    assert "data.train" in str(caught.value)
    assert "model.name" in str(caught.value)


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("run", "name", "a/b"),
        ("run", "name", ""),
        ("run", "name", ".."),
        ("run", "folder", ""),
        ("run", "seed", -1),
        ("data", "train", ("",)),
        ("data", "validation", ("",)),
        ("data", "validation_fraction", 1.0),
        ("data", "validation_fraction", -0.1),
        ("data", "validation_fraction", math.nan),
        ("data", "fields", ()),
        ("data", "fields", ("x", "x")),
        ("data", "global_batch", 0),
        ("data", "streams", -1),
        ("data", "mixing_chunks", -1),
        ("data", "transform", "no name"),
        ("model", "name", "module:"),
        ("model", "arguments", {"not-a-name": 1}),
        ("loss", "name", ""),
        ("loss", "arguments", {"": 1}),
        ("optimizer", "name", ":x"),
        ("optimizer", "lr", 0.0),
        ("optimizer", "lr", math.inf),
        ("optimizer", "lr", math.nan),
        ("optimizer", "arguments", {"lr": 0.1}),
        ("scheduler", "name", "a:b:c"),
        ("train", "epochs", 0),
        ("train", "clip_norm", -1.0),
        ("train", "clip_norm", math.inf),
        ("train", "micro_batch", -1),
        ("reduce", "bucket_bytes", 0),
        ("train", "threads", -1),
        ("train", "on_end", "1x"),
        ("checkpoint", "every_epochs", -1),
        ("checkpoint", "every_steps", -1),
        ("checkpoint", "keep", 0),
        ("log", "every_steps", -1),
        ("log", "progress_s", 0.0),
        ("watch", "stall_warning_s", -1.0),
        ("watch", "stall_abort_s", float("inf")),
        ("watch", "compare_steps", -1),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(section: str, key: str, value: object) -> None:
    changed = replace(VALID, **{section: replace(getattr(VALID, section), **{key: value})})
    with pytest.raises(ConfigError, match=rf"{section}\.{key}"):
        validate(changed)


def test_two_sources_of_validation_samples_are_refused() -> None:
    data = DataSection(train=("a",), validation=("b",), validation_fraction=0.1)
    with pytest.raises(ConfigError, match="both set"):
        validate(replace(VALID, data=data))


def test_module_function_names_are_allowed() -> None:
    validate(replace(VALID, model=ModelSection("my.package.nets:Net.make")))


def test_every_number_and_name_has_a_check() -> None:
    """Choices and booleans are checked on reading; any folder may be named for stage."""
    unchecked = {
        f"{section}.{name}"
        for section, values in ((field.name, getattr(RunConfig(), field.name)) for field in fields(RunConfig()))
        for name, hint in get_type_hints(type(values), include_extras=True).items()
        if not hasattr(hint, "__metadata__") and hint is not bool and get_origin(hint) not in (dict, Literal)
    }
    assert unchecked == {"data.stage_folder"}


@given(st.dictionaries(st.text(), values | st.dictionaries(st.text(), values, max_size=3), max_size=5))
def test_written_text_reads_back_equal(table: dict[str, Any]) -> None:
    assert tomllib.loads(toml.write(table)) == table


@given(st.text(), st.dictionaries(names, values), st.lists(st.text()), st.floats(allow_nan=False))
def test_a_configuration_survives_its_text(name: str, arguments: dict[str, Any], files: list[str], lr: float) -> None:
    original = RunConfig(
        data=DataSection(train=tuple(files)),
        model=ModelSection(name, arguments),
        optimizer=config.OptimizerSection(lr=lr),
    )
    assert config.from_dict(tomllib.loads(config.to_toml(original))) == original


def test_not_a_number_survives_its_text() -> None:
    assert math.isnan(tomllib.loads(toml.write({"a": math.nan}))["a"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("0.5", 0.5),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ("'a b'", "a b"),
        ("gelu", "gelu"),
        ("", ""),
        ("1\nb = 2", "1\nb = 2"),
        ("2020-01-01", "2020-01-01"),
        ("0.1,0.2", "0.1,0.2"),
    ],
)
def test_a_command_line_value_is_read_as_toml_or_is_a_string(text: str, value: object) -> None:
    assert toml.parse_value(text) == value


@pytest.mark.parametrize(
    ("train", "said"),
    [
        ({"precision": "fp16"}, 'train.precision is "fp16", but reduce.reducer is null'),
        ({"callbacks": {"a": {"name": "no_colon"}}}, 'expected a name = "module:Class" in each table'),
        ({"callbacks": {"a": {}}}, 'expected a name = "module:Class" in each table'),
    ],
)
def test_what_ranks_or_callbacks_cannot_be(train: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        validate(replace(config.from_dict({"train": train, "reduce": {"reducer": "null"}}), data=VALID.data))
