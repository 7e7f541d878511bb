"""The JSON schema for editors says what the loader takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from support.package import BUNDLED

from axsparse.config.schema import FIELDS, editor_schema

CONFIGS = Path(__file__).parents[2] / "configs"


@pytest.fixture(scope="module")
def validator() -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema: pip install axsparse[test]")
    checker = jsonschema.Draft202012Validator
    checker.check_schema(editor_schema())
    return checker(editor_schema())


def test_it_has_every_setting_with_its_meaning() -> None:
    schema = editor_schema()
    found: dict[str, Any] = {}
    for name, field in schema["properties"].items():
        references = [member["$ref"] for member in field.get("anyOf", [field]) if "$ref" in member]
        for reference in references:
            section = schema["$defs"][reference.rpartition("/")[2]]
            assert not section["additionalProperties"]
            found |= {f"{name}.{leaf}": value for leaf, value in section["properties"].items()}
        if not references:
            found[name] = field

    assert set(found) == set(FIELDS)
    assert all(field["description"] and "default" in field for field in found.values())


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_configurations_pass(name: str, validator: Any) -> None:
    text = (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")

    assert [error.message for error in validator.iter_errors(yaml.safe_load(text))] == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"trian": {}},
        {"train": {"setps": 3}},
        {"train": {"steps": 0}},
        {"train": {"steps": "many"}},
        {"layout": {"g_inter": "none"}},
        {"model": {"num_key_value_heads": 2}},
        {"model": {"name": "hf", "num_layers": 2}},
        {"optimizer": {"betas": [0.9]}},
    ],
)
def test_what_the_loader_refuses_fails(wrong: dict[str, Any], validator: Any) -> None:
    assert not validator.is_valid(wrong)
