"""The schema keeps its promises: documented, typed, frozen, strict, and writable as YAML."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from support.page_blocks import PACKAGE

from axsparse.config.load import configure, to_yaml
from axsparse.config.model_config import FAMILIES, Family
from axsparse.config.schema import FIELDS, Config, with_absolute_paths
from axsparse.config.section import Section
from axsparse.runtime.errors import ConfigError

SECTIONS: list[type[Section]] = [
    Config,
    # Files of other rooms, such as tables of published runs, have sections of their own.
    *(
        s
        for s in Section.__subclasses__()
        if s not in (Config, Family)
        and s.__module__.startswith(Config.__module__.rpartition(".")[0])
    ),
    *FAMILIES.values(),
]
every_section = pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.__name__)


@every_section
def test_every_field_has_a_type_and_a_meaning(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        assert field.annotation not in (None, Any), name
        kind = field.annotation
        is_section = isinstance(kind, type) and issubclass(kind, Section)
        assert ((kind.__doc__ if is_section else field.description) or "").strip(), name


METHODS = (FunctionType, property)


@every_section
def test_nothing_in_a_section_is_silently_no_field(section: type[Section]) -> None:
    classes = [one for one in section.__mro__ if issubclass(one, Section) and one is not Section]
    written = {
        name
        for one in classes
        for name in (*one.__annotations__, *vars(one))
        if not name.startswith("_") and not isinstance(vars(one).get(name), METHODS)
    }
    pydantic_own = {"model_config", "model_fields", "model_computed_fields", "model_post_init"}

    assert written - pydantic_own == set(section.model_fields)
    assert section.__private_attributes__.keys() <= {"_source"}


@every_section
def test_every_section_is_frozen_strict_and_closed(section: type[Section]) -> None:
    instance = section()

    for name in section.model_fields:
        with pytest.raises(ValidationError, match="frozen"):
            setattr(instance, name, getattr(instance, name))
    with pytest.raises(ValidationError, match="not permitted"):
        section.model_validate({"no_such_key": 1})
    assert section.model_config.get("strict")


def test_the_sections_of_a_config_are_all_the_sections_there_are() -> None:
    used = {field.annotation for field in Config.model_fields.values()} | {*FAMILIES.values()}

    assert {section for section in SECTIONS if section is not Config} <= used


# YAML forbids some characters and folds others even in quotes; `test_any_text_survives`
# covers those, which `to_yaml` escapes.
_TEXT = st.text(st.characters(exclude_categories=("Cc", "Cs", "Cn", "Zl", "Zp")))


def _values(schema: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid values of one field, from its JSON schema."""
    if "anyOf" in schema:
        return st.one_of([_values(member) for member in schema["anyOf"]])
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    match schema["type"]:
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "string":
            return _TEXT.filter(lambda text: len(text) >= schema.get("minLength", 0))
        case "integer":
            return st.integers(schema["minimum"], schema.get("maximum"))
        case "number":
            low = schema.get("minimum", schema.get("exclusiveMinimum"))
            return st.floats(
                low,
                schema.get("maximum", schema.get("exclusiveMaximum")),
                exclude_min="exclusiveMinimum" in schema,
                exclude_max="exclusiveMaximum" in schema,
                allow_infinity=False,
            )
        case "array" if "prefixItems" in schema:
            return st.tuples(*map(_values, schema["prefixItems"])).map(list)
        case "array":
            return st.lists(_values(schema["items"]))
        case "object":
            return st.just({})  # What is in it is transformers'.
        case unknown:
            raise AssertionError(f"no values for {unknown}")


def _fields(family: str) -> dict[str, st.SearchStrategy[Any]]:
    """The optional settings with a model of this family, but for a folder, which would be read."""
    own = {f"model.{leaf}" for leaf in FAMILIES[family].model_fields} - {"model.name"}
    return {
        key: _values(schema)
        for key, schema in FIELDS.items()
        if key in own or not key.startswith("model.")
    }


def _settings() -> st.SearchStrategy[dict[str, Any]]:
    """A model and some settings, few enough that most draws contradict no rule of a section."""

    def of(family: str, fields: dict[str, st.SearchStrategy[Any]]) -> Any:
        some = st.sets(st.sampled_from(sorted(fields)), max_size=12)
        return some.flatmap(
            lambda keys: st.fixed_dictionaries(
                {"model.name": st.just(family), **{key: fields[key] for key in sorted(keys)}}
            )
        )

    return st.one_of([of(family, _fields(family)) for family in FAMILIES])


@settings(max_examples=20)
@given(chosen=_settings())
def test_any_valid_config_survives_being_written_and_read(
    tmp_path_factory: pytest.TempPathFactory, chosen: dict[str, Any]
) -> None:
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in chosen.items()]
    try:
        config = configure(None, overrides)
    except ConfigError:
        reject()  # settings of a section that contradict each other; a row of tests/errors

    file = tmp_path_factory.getbasetemp() / "round_trip.yaml"
    file.write_text(to_yaml(config), encoding="utf-8")

    values = config.by_key()
    lists = {key: [*values[key]] for key in chosen if isinstance(values[key], tuple)}
    assert {key: lists.get(key, values[key]) for key in chosen} == chosen
    assert configure(str(file)) == config


@settings(max_examples=60)
@given(
    text=st.text(
        st.characters(exclude_categories=["Cs"], exclude_characters="\0~$\x85\u2028\u2029"),
        min_size=1,
    )
)
def test_any_text_survives(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    file = tmp_path_factory.getbasetemp() / "text.yaml"
    file.write_text(to_yaml(Config(run_dir=text)), encoding="utf-8", newline="")

    assert configure(str(file)).run_dir == text


def test_paths_have_the_users_home_and_variables_in_their_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    monkeypatch.setenv("SCRATCH", "/scratch")

    blended = ["data.source=tokens", "data.blend=[$SCRATCH/a=1, '${HOME}b=2']"]
    single = [
        *("run_dir", "data.path", "data.validation", "layout.cluster", "model.weights"),
        *("pruning.mask", "train.teacher"),
    ]

    assert configure(None, blended).data.blend == ("/scratch/a=1", "/home/meb=2")
    for written, path in (("~/a", "/home/me/a"), ("$SCRATCH/a", "/scratch/a")):
        config = configure(None, [blended[0], *(f"{key}={written}" for key in single)])
        assert {config.by_key()[key] for key in single} == {path}


def test_absolute_paths_name_the_model_and_the_tokens_of_an_export(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir("/")
    tokens = ["data.source=tokens", "data.path=a/b"]

    of_path, of_blend = (
        with_absolute_paths(configure(None, settings))
        for settings in (tokens, [tokens[0], "data.blend=[a/b=0.5, /c=2]"])
    )

    assert (of_path.data.path, of_path.model.from_) == ("/a/b", None)
    assert of_blend.data.blend == ("/a/b=0.5", "/c=2")


def test_the_written_file_is_complete_and_in_the_schemas_order() -> None:
    keys = [line.split(":")[0] for line in to_yaml(Config()).splitlines() if line[0] != " "]

    assert keys == list(Config.model_fields)
    assert "  betas: [0.9, 0.95]\n" in to_yaml(Config())


AUTO_PAGE = Path(__file__).parents[2] / "docs" / "reference" / "auto.md"
AUTO_ROW = re.compile(r"\| `(?P<key>[\w.]+)` \| `(?P<file>[\w/]+\.py)` \| `(?P<function>\w+)` \|")


def accepts_auto(schema: dict[str, Any]) -> bool:
    """Whether a setting may be "auto": by its type, or as a text with that default."""
    members = schema.get("anyOf", [schema])
    named = [value for one in members for value in (one.get("const"), *one.get("enum", ()))]
    return "auto" in (*named, schema.get("default"))


def auto_rows() -> list[re.Match[str]]:
    """The rows of the table, by which function each `auto` is decided."""
    lines = AUTO_PAGE.read_text(encoding="utf-8").splitlines()
    table = [line for line in lines if line.startswith("|")][2:]
    rows = [AUTO_ROW.match(line) for line in table]
    assert None not in rows, "setting, file and function"
    return [row for row in rows if row is not None]


def test_one_table_names_every_setting_that_may_be_auto_exactly_once() -> None:
    settings_of_schema = [key for key, schema in FIELDS.items() if accepts_auto(schema)]

    assert len(settings_of_schema) > 10
    assert [row["key"] for row in auto_rows()] == settings_of_schema


def test_the_functions_that_decide_an_auto_exist() -> None:
    for row in auto_rows():
        tree = ast.parse((PACKAGE / row["file"]).read_text(encoding="utf-8"))
        functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        assert row["function"] in functions, row["key"]
