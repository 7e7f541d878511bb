"""Configuration: `schema` (fields and defaults), `load` (YAML, overrides), `validate` (rules)."""
