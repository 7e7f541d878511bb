"""Reads a configuration: strict YAML, then `--set` overrides; every mistake is one line.

`yaml_dialect.py` reads the file, pydantic checks the values by `schema.py`; here each value gets
its origin, and pydantic's errors become a line that names the key and where it was set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from axsparse.config.hf_config import HF, with_folder
from axsparse.config.messages import (
    Setting,
    refusal,
    show,
    unknown_key,
)
from axsparse.config.schema import FIELDS, SECTIONS, Config
from axsparse.config.yaml_dialect import YamlDumper, compose, is_null, line_of, reject_tag, scalar
from axsparse.runtime.errors import ConfigError, MissingInputError, reading

PACKAGE = Path(__file__).resolve().parents[1]


def configure(
    source: Mapping[str, Any] | str | Path | None, overrides: Sequence[str] = ()
) -> Config:
    """A configuration from a file or dictionaries, and `key=value` overrides, which win.

    A file is found and read as `--config` and `--set` of `axsparse train` do, so that a script with
    a custom model can take both; dictionaries are overridden alike:

        config = ax.configure("my_run.yaml", ["train.steps=500", "layout.g_inter=4"])
        config = ax.configure({"train": {"steps": 50}}, sys.argv[1:])

    `source` is a path if it names a file or holds a "/"; otherwise the name of a bundled config.
    None takes the defaults. A configuration remembers where each key was set, for error messages
    (`Config.where`). Raises MissingInputError for a file that is not there or cannot be read,
    ConfigError for everything that cannot be run.
    """
    settings, name = _read(source, "configure")
    settings.update(_read_override(override) for override in overrides)
    return _validated(settings, name)


def load_settings(
    source: Config | Mapping[str, Any] | str | Path | None, *above: Mapping[str, Any]
) -> Config:
    """The configuration of `ax.Trainer`: a source, and settings above it, of which later ones win.

    A source is what `configure` takes or has returned. Settings are by dotted keys, or by their
    last parts alone where only one key ends so. Raises what `configure` raises.
    """
    if isinstance(source, Config):
        values, name = source.by_key(), source._source.name
        settings = {key: Setting(values[key], origin) for key, origin in source.origins.items()}
    elif source is None or isinstance(source, (Mapping, str, Path)):
        settings, name = _read(source, "config")
    else:
        raise ConfigError(
            f"Trainer: config is {type(source).__name__}; give a path, a dict such as "
            '{"pruning.sparsity": 0.5}, or what configure returns'
        )
    for given in above:
        said = ((full_key(key), Setting(value, "Trainer")) for key, value in given.items())
        settings.update(_once(said))
    return _validated(settings, name)


def _read(
    source: Mapping[str, Any] | str | Path | None, origin: str
) -> tuple[dict[str, Setting], str | None]:
    """The settings of a file or of dictionaries, and the stem of the file."""
    if source is None:
        return {}, None
    if isinstance(source, Mapping):
        return _once(_read_dictionaries(source, origin)), None
    path = find_file("config", str(source), packaged_folder("configs"))
    return dict(_read_file(path)), path.stem


def full_key(short: str) -> str:
    """The dotted key of a setting that is named by its last part; ConfigError unless one is, or
    one of several is in `train`, which a trainer's own settings are."""
    found = [key for key in FIELDS if key == short or key.endswith(f".{short}")]
    for usual in (short, f"train.{short}"):
        if usual in found:
            return usual
    if not found:
        raise unknown_key(short, "Trainer")
    if len(found) > 1:
        raise ConfigError(
            f"{short} (Trainer): {' and '.join(found)} end so; write "
            f'config={{"{found[0]}": …}} for the first'
        )
    return found[0]


def _once(settings: Iterator[tuple[str, Setting]]) -> dict[str, Setting]:
    """The settings by key; ConfigError if one is given twice, by different names."""
    found: dict[str, Setting] = {}
    for key, setting in settings:
        if key in found:
            raise ConfigError(
                f"{key} ({setting.origin}): given twice, {show(found[key].value)} and "
                f"{show(setting.value)}; keep one of them"
            )
        found[key] = setting
    return found


def _read_dictionaries(source: Mapping[str, Any], origin: str) -> Iterator[tuple[str, Setting]]:
    for section, given in source.items():
        nested = section in SECTIONS and isinstance(given, Mapping)
        for leaf, value in given.items() if nested else [("", given)]:
            key = f"{section}.{leaf}" if leaf else section
            if key not in FIELDS:
                raise unknown_key(key, origin)
            yield key, Setting(value, origin)


def _validated(settings: Mapping[str, Setting], name: str | None) -> Config:
    settings = with_folder(settings)
    nested: dict[str, Any] = {}
    for key, setting in settings.items():
        section, _, leaf = key.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[leaf] = setting.value
    try:
        config = Config.model_validate(nested)
    except ValidationError as error:
        raise refusal(error, settings) from None
    return config.with_origins(name, {key: one.origin for key, one in settings.items()})


def to_yaml(config: Config) -> str:
    """Every key in the schema's order; `configure` reads it back to an equal Config."""
    text: str = yaml.dump(
        config.model_dump(mode="json"), Dumper=YamlDumper, sort_keys=False, allow_unicode=True
    )
    return text


def setting_to_yaml(name: str, value: object) -> str:
    """One setting as `to_yaml` writes it, however long; `value` is one of JSON's."""
    text: str = yaml.dump({name: value}, Dumper=YamlDumper, width=math.inf, allow_unicode=True)
    return text.rstrip("\n")


# --- files -----------------------------------------------------------------------------


def packaged_folder(name: str) -> Path:
    """A folder that comes with the package: inside it in an installed wheel, else next to it."""
    # Next to an installed package, a folder of this name belongs to somebody else.
    return PACKAGE / name if (PACKAGE / name).is_dir() else PACKAGE.parent / name


def find_file(kind: str, source: str, folder: Path) -> Path:
    """The file that a user names by its path, or a bundled one in `folder` by its name.

    `kind` says what it is of, such as "config". MissingInputError if there is no such file.
    """
    path, name = Path(source), source.removesuffix(".yaml")
    if path.is_file() or ("/" in source and path.exists()):
        return path
    bundled = sorted(each.stem for each in folder.glob("*.yaml"))
    if name in bundled:
        return folder / f"{name}.yaml"
    what = "a folder" if path.is_dir() else "no such file"
    near = get_close_matches(path.stem[:60], bundled, n=1)
    suggestion = f"did you mean {near[0]}?" if near else "name an existing one"
    raise MissingInputError(
        f"{kind} {source!r}: {what} and no bundled {kind} of that name; "
        f"{suggestion} (bundled: {', '.join(bundled)})"
    )


def read_text(kind: str, path: Path) -> str:
    """The text of a file; MissingInputError if it cannot be read, ConfigError if it is no UTF-8."""
    with reading(f"{kind} {str(path)!r}:", "name a readable YAML file"):
        data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path.name}:{line}: byte {data[error.start]:#04x} is not UTF-8; "
            "save the file as UTF-8"
        ) from None


def _read_file(path: Path) -> dict[str, Setting]:
    file = path.name
    root = compose(read_text("config", path), lambda line: f"{file}:{line}")
    if root is None or is_null(root):
        return {}
    settings: dict[str, Setting] = {}
    for key, origin, node in entries(root, f"{file}:{line_of(root)}", file, _reject_dotted):
        if key in SECTIONS:
            here = f"{key} ({origin})"
            for leaf, leaf_origin, value in entries(node, here, file, _reject_unknown, f"{key}."):
                settings[leaf] = _setting(leaf, leaf_origin, value)
        else:
            settings[key] = _setting(key, origin, node)
    return settings


def _read_override(override: str) -> tuple[str, Setting]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if key.startswith("-"):  # of a script's own arguments, since commands know their options
        raise ConfigError(
            f"configure: {show(override)} is an option, and overrides have none; write key=value "
            "alone, like pruning.sparsity=0.8"
        )
    if not key or not equals:
        raise ConfigError(
            f"--set {show(override)}: not of the form key=value; "
            "write it like --set pruning.sparsity=0.8"
        )
    if key not in FIELDS:
        raise unknown_key(key, "--set")
    node = compose(text, lambda _: f"{key} (--set)")
    return key, Setting(None, "--set") if node is None else _setting(key, "--set", node)


def entries(
    node: yaml.Node, here: str, file: str, check: Callable[[str, str], None], prefix: str = ""
) -> Iterator[tuple[str, str, yaml.Node]]:
    """The keys of a mapping after a prefix, each with its "file:line" and its value.

    ConfigError for anything but a mapping, for a key that is given twice, and for one that
    `check(key, origin)` rejects.
    """
    reject_tag(node, here)
    if not isinstance(node, yaml.MappingNode):
        given = "a list" if isinstance(node, yaml.SequenceNode) else show(scalar(node))
        raise ConfigError(f"{here}: {given} is not a mapping; write `key: value` lines")
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = line_of(key_node)
        origin = f"{file}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{origin}: a list or section cannot be a key; write a name")
        reject_tag(key_node, origin)
        key = prefix + key_node.value
        check(key, origin)
        if key in lines:
            raise ConfigError(
                f"{key} ({origin}): given twice, first in line {lines[key]}; keep one of them"
            )
        lines[key] = line
        yield key, origin, value


def _reject_dotted(key: str, origin: str) -> None:
    if "." in key and key in FIELDS:
        section, _, leaf = key.partition(".")
        raise ConfigError(
            f"{key} ({origin}): dotted keys are for --set; write {section}: {{{leaf}: …}}"
        )
    _reject_unknown(key, origin)


def _reject_unknown(key: str, origin: str) -> None:
    if key not in FIELDS and key not in SECTIONS:
        raise unknown_key(key, origin)


def _setting(key: str, origin: str, node: yaml.Node) -> Setting:
    """The value of a node: a scalar or a flat list of scalars, since the schema has no other but
    the settings of another library."""
    here = f"{key} ({origin})"
    reject_tag(node, here)
    if key == HF and isinstance(node, yaml.MappingNode):
        return Setting(_nested(node, here), origin)
    if isinstance(node, yaml.ScalarNode):
        return Setting(scalar(node), origin)
    if isinstance(node, yaml.SequenceNode) and all(
        isinstance(item, yaml.ScalarNode) for item in node.value
    ):
        for item in node.value:
            reject_tag(item, here)
        return Setting([scalar(item) for item in node.value], origin)
    given = "a mapping" if isinstance(node, yaml.MappingNode) else "a nested list"
    raise ConfigError(f"{here}: {given} is not a value; write a scalar or a flat list")


def _nested(node: yaml.Node, here: str) -> Any:
    """The value of a node of settings that are not ours: mappings, lists and scalars."""
    reject_tag(node, here)
    if isinstance(node, yaml.MappingNode):
        pairs = [(_nested(key, here), _nested(value, here)) for key, value in node.value]
        if not all(isinstance(key, str) for key, _ in pairs) or len(dict(pairs)) < len(pairs):
            raise ConfigError(f"{here}: has keys that are no names, or one twice; keep one of each")
        return dict(pairs)
    if isinstance(node, yaml.SequenceNode):
        return [_nested(item, here) for item in node.value]
    return scalar(node)
