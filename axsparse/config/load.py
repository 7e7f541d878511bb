"""Reads a configuration: strict YAML, then `--set` overrides; every mistake is one line.

PyYAML's own loaders follow version 1.1, by which `1e-3` and `1_000` are a text and a number, and
`no` and `on` are truth values; here they are version 1.2's. Keys are taken from YAML's nodes,
because only nodes know their lines. pydantic checks the values by `schema.py`; here each gets its
origin, and pydantic's errors become a line that names the key and where it was set.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import NoneType
from typing import Any

import yaml
from pydantic import ValidationError
from yaml.reader import ReaderError

from axsparse.config.hf_config import BUNDLED, HF, with_folder
from axsparse.config.messages import (
    FOREIGN_ARGUMENTS,
    Setting,
    instead_of_nested,
    is_nested,
    quoted_argument,
    refusal,
    show,
    takes_texts,
    unknown_key,
)
from axsparse.config.schema import FIELDS, SECTIONS, Config
from axsparse.runtime.errors import ConfigError, MissingInputError, check_kind, one_line, reading
from axsparse.runtime.files.paths import expanded, kind_of
from axsparse.runtime.files.run_folder import CONFIG_FILE, has_mark

YAML_TAG = "tag:yaml.org,2002:"
YAML_SCALARS = {
    f"{YAML_TAG}null": re.compile(r"(~|null|Null|NULL|)\Z"),
    f"{YAML_TAG}bool": re.compile(r"(true|True|TRUE|false|False|FALSE)\Z"),
    # Longer whole numbers match as floats, become infinite and are refused.
    f"{YAML_TAG}int": re.compile(r"[-+]?[0-9]{1,999}\Z"),
    f"{YAML_TAG}float": re.compile(
        r"([-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))\Z"
    ),
}
_RESOLVERS = {None: list(YAML_SCALARS.items())}  # whatever a scalar's first character is


class YamlLoader(yaml.SafeLoader):
    """Makes texts, numbers, truth values, lists and mappings, and nothing else."""

    yaml_implicit_resolvers = _RESOLVERS


def _integer(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    """The number in decimal digits; PyYAML takes one with a leading zero for an octal number."""
    return int(loader.construct_scalar(node))


YamlLoader.add_constructor(f"{YAML_TAG}int", _integer)


class YamlDumper(yaml.SafeDumper):
    """Quotes text that `YamlLoader` would read as something else, and keeps lists on one line."""

    yaml_implicit_resolvers = _RESOLVERS


YamlDumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence(f"{YAML_TAG}seq", value, flow_style=True)
)


CORRECT = "correct it there"
QUOTES = "a text that begins with * or & stands in quotes, such as '*.bias=0'"


def compose(text: str, at: Callable[[int], str], quotes: str = QUOTES) -> yaml.Node | None:
    """The root node, or None for an empty text; `at(line)` names the place of an error, and
    `quotes` is the suggestion for a text that YAML takes for an alias or an anchor."""
    try:
        loader = YamlLoader(text)
    except ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise ConfigError(
            f"{at(line)}: character {text[error.position]!r} is not allowed in YAML; remove it"
        ) from None
    try:
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        line = loader.line if error.problem_mark is None else error.problem_mark.line
        problem = ", ".join(part for part in (error.context, error.problem) if part)
        suggestion = quotes if "alias" in problem or "anchor" in problem else CORRECT
        raise ConfigError(f"{at(line + 1)}: not YAML: {problem}; {suggestion}") from None
    except (ValueError, OverflowError, RecursionError) as error:
        # PyYAML does not catch these, such as escapes beyond Unicode.
        raise ConfigError(f"{at(loader.line + 1)}: not YAML: {error}; {CORRECT}") from None
    return node


def value_of(node: yaml.Node, here: str) -> Any:
    """The value of a node; ConfigError if it has none."""
    try:
        return YamlLoader("").construct_object(node, deep=True)
    except Exception as error:  # Constructors raise what they like about a value under a tag.
        problem = error.problem if isinstance(error, yaml.MarkedYAMLError) else one_line(error)
        raise ConfigError(f"{here}: not YAML: {problem}; write a plain value") from None


PACKAGE = Path(__file__).resolve().parents[1]


def configure(
    source: Mapping[str, Any] | str | Path | None, overrides: Sequence[str] = ()
) -> Config:
    """A configuration from a file or dictionaries, and `key=value` overrides, which win.

    A file is found and read as `--config` and `--set` of `axsparse train` do, so that a script with
    a custom model can take both; dictionaries are overridden alike. The config.yaml in a run's
    directory means that directory:

        config = ax.configure("my_run.yaml", ["train.steps=500", "layout.g_inter=4"])
        config = ax.configure({"train": {"steps": 50}}, sys.argv[1:])

    `source` is a path if it names a file or holds a "/"; otherwise the name of a bundled config.
    None takes the defaults. A configuration remembers where each key was set, for error messages
    (`Config.where`). Raises MissingInputError for a file that is not there or cannot be read,
    ConfigError for everything that cannot be run.
    """
    kinds = (Mapping, str, Path, NoneType)
    check_kind("configure: source", source, kinds, "give a mapping, a file or a bundled name")
    if isinstance(overrides, str):
        raise ConfigError(
            f"configure: overrides is a text; give a list of key=value: [{overrides!r}]"
        )
    check_kind("configure: overrides", overrides, Iterable, "give a list of key=value")
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
    way = 'give a path, a dict such as {"pruning.sparsity": 0.5}, or what configure returns'
    check_kind("Trainer: config", source, (Config, Mapping, str, Path, NoneType), way)
    if isinstance(source, Config):
        values, name = source.by_key(), source._source.name
        settings = {key: Setting(values[key], origin) for key, origin in source.origins.items()}
    else:
        settings, name = _read(source, "config")
    for given in above:
        for key in given.keys() & FOREIGN_ARGUMENTS.keys():
            if key != "validation" or not isinstance(given[key], str | Path | NoneType):
                raise ConfigError(
                    f"{key} (Trainer): unknown argument; give {FOREIGN_ARGUMENTS[key]}"
                )
        said = ((full_key(key), Setting(value, "Trainer")) for key, value in given.items())
        settings.update(_once(said))
    return _validated(settings, name)


PLACES = ("data.path", "data.blend", "data.validation")
"""The settings of a run that may be others when it is read."""


def data_elsewhere(config: Config, overrides: Sequence[str]) -> Config:
    """A run's configuration with `key=value` of `PLACES`; ConfigError for another key, and for data
    that are no prepared tokens."""
    if other := [each for each in overrides if each.partition("=")[0].strip() not in PLACES]:
        of_tokens = f"set one of {', '.join(PLACES)}"
        way = of_tokens if config.data.source == "tokens" else "leave it out"
        raise ConfigError(f"--set: {other[0]} is the run's own; {way}")
    if overrides and config.data.source != "tokens":
        raise ConfigError(
            f"--set: {overrides[0]} is where tokens are, and the run's data are "
            f"{config.data.source}; leave it out"
        )
    there = {f"data.{key}": value for key, value in config.data.model_dump(mode="json").items()}
    return config.model_copy(update={"data": configure(there, overrides).data})


def _read(
    source: Mapping[str, Any] | str | Path | None, origin: str
) -> tuple[dict[str, Setting], str | None]:
    """The settings of a file or of dictionaries, and the stem of the file."""
    if source is None:
        return {}, None
    if isinstance(source, Mapping):
        return _once(_read_dictionaries(source, origin)), None
    path = find_file("config", str(source), packaged_folder("configs"))
    settings = _once(_read_file(path))
    if "run_dir" in settings and path.name == CONFIG_FILE and has_mark(path.parent):
        # A run's own file, which may have been moved or copied with its directory.
        settings["run_dir"] = Setting(str(path.parent), settings["run_dir"].origin)
    return settings, path.stem


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
            f"{short} (Trainer): {' and '.join(found)} end so; write the one that you mean, such "
            f'as config={{"{found[-1]}": …}}'
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
                raise unknown_key(str(key), origin)
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


def bundled_source() -> str:
    """The source by which `configure` reads `BUNDLED`, also next to a file of that name."""
    return str(packaged_folder("configs") / BUNDLED) if _is_own(Path(BUNDLED)) else BUNDLED


def _is_own(path: Path) -> bool:
    """Whether a file that has the name of `BUNDLED` is another one, of the user's."""
    bundled = packaged_folder("configs") / BUNDLED
    return path.name == BUNDLED and path.is_file() and not path.samefile(bundled)


def find_file(kind: str, source: str, folder: Path) -> Path:
    """The file that a user names by its path, or a bundled one in `folder` by its name.

    `kind` says what it is of, such as "config". MissingInputError if there is no such file.
    """
    path, name = Path(expanded(source)), source.removesuffix(".yaml")
    there = kind_of(f"{kind} {source!r}:", path)
    if there == "file" or ("/" in source and there):
        return path
    bundled = sorted(each.stem for each in folder.glob("*.yaml"))
    if name in bundled:
        return folder / f"{name}.yaml"
    what = "a folder" if there == "folder" else "no such file"
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


def _read_file(path: Path) -> Iterator[tuple[str, Setting]]:
    # The name alone is an origin of the bundled file's settings, which count as nobody's.
    file = f"{path.parent}/{path.name}" if _is_own(path) else path.name
    root = compose(read_text("config", path), lambda line: f"{file}:{line}")
    if root is None or root.tag == f"{YAML_TAG}null":
        raise ConfigError(f"{file}: no settings are in it; write some as `key: value` lines")
    begin = f"{file}:{root.start_mark.line + 1}"
    for key, origin, node in entries(root, begin, file, _reject_unknown):
        if key in SECTIONS:
            for leaf, leaf_origin, value in entries(
                node, f"{key} ({origin})", file, _reject_unknown, f"{key}."
            ):
                yield leaf, _setting(leaf, leaf_origin, value)
        else:
            yield key, _setting(key, origin, node)


def _read_override(override: str) -> tuple[str, Setting]:
    check_kind("configure: an override", override, (str,), "write key=value")
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
    quotes = f"write {quoted_argument(key, text.strip())}" if takes_texts(key) else CORRECT
    node = compose(text, lambda _: f"{key} (--set)", quotes)
    return key, Setting(None, "--set") if node is None else _setting(key, "--set", node)


def entries(
    node: yaml.Node, here: str, file: str, check: Callable[[str, str], None], prefix: str = ""
) -> Iterator[tuple[str, str, yaml.Node]]:
    """The keys of a mapping after a prefix, each with its "file:line" and its value.

    ConfigError for anything but a mapping, for a key that is given twice, and for one that
    `check(key, origin)` rejects.
    """
    if not isinstance(node, yaml.MappingNode):
        own = SECTIONS.get(prefix.rstrip("."), ())
        below = f" below it, of {', '.join(own)}" if own else ""
        raise ConfigError(f"{here}: not a mapping; write `key: value` lines{below}")
    _reject_tag(node, here)
    lines: dict[str, int] = {}
    for key_node, value in node.value:
        line = key_node.start_mark.line + 1
        origin = f"{file}:{line}"
        if not isinstance(key_node, yaml.ScalarNode):
            raise ConfigError(f"{origin}: a list or section cannot be a key; write a name")
        _reject_tag(key_node, origin)
        key = prefix + key_node.value
        check(key, origin)
        if key in lines:
            raise ConfigError(
                f"{key} ({origin}): given twice, first in line {lines[key]}; keep one of them"
            )
        lines[key] = line
        yield key, origin, value


def _reject_tag(node: yaml.Node, here: str) -> None:
    """ConfigError for a tag such as `!mine`, of which nobody makes a value here."""
    if not node.tag.startswith(YAML_TAG):
        raise ConfigError(f"{here}: not YAML: the tag {show(node.tag)} is unknown; leave it out")


def _reject_unknown(key: str, origin: str) -> None:
    if key not in FIELDS and key not in SECTIONS:
        raise unknown_key(key, origin)


def _setting(key: str, origin: str, node: yaml.Node) -> Setting:
    """A scalar or a flat list: the schema has nothing else but the settings of another library."""
    value = value_of(node, f"{key} ({origin})")
    items = value if isinstance(value, list) else [value]
    if key != HF and any(map(is_nested, items)):
        way = instead_of_nested(key, value)
        raise ConfigError(f"{key} ({origin}): lists or mappings within a value; write {way}")
    typed = [str(item.value) for item in node.value] if isinstance(value, list) else node.value
    return Setting(value, origin, typed)
