"""The command lines of all commands, for shell completion and for the reference of commands."""

from __future__ import annotations

from importlib import import_module

from axsparse.cli.parser import CommandParser

_PLACES = {
    "train": ("axsparse.train", "parser"),
    "config show": ("axsparse.cli.config", "show_parser"),
    "config schema": ("axsparse.cli.config", "schema_parser"),
    "plan": ("axsparse.cli.plan", "parser"),
    "calibrate": ("axsparse.cli.calibrate", "parser"),
    "report": ("axsparse.cli.report", "parser"),
    "trace compare": ("axsparse.cli.trace", "parser"),
    "data prepare": ("axsparse.cli.data", "parser"),
    "ticket show": ("axsparse.cli.ticket", "show_parser"),
    "ticket import": ("axsparse.cli.ticket", "import_parser"),
    "ticket export": ("axsparse.cli.ticket", "export_parser"),
    "prune": ("axsparse.cli.prune", "parser"),
    "checkpoint": ("axsparse.cli.checkpoint", "parser"),
    "generate": ("axsparse.cli.generate", "parser"),
    "evaluate": ("axsparse.cli.evaluate", "parser"),
    "export": ("axsparse.cli.export", "parser"),
    "submit": ("axsparse.cli.submit", "parser"),
    "launch": ("axsparse.cli.restarting_launch", "parser"),
    "doctor": ("axsparse.cli.doctor.doctor", "parser"),
    "completion": ("axsparse.cli.completion", "parser"),
}
"""Words after `axsparse` -> module and function of their command line; modules are loaded late."""


def all_parsers() -> dict[str, CommandParser]:
    """The command line of every command, by the words after `axsparse`; none loads torch."""
    return {
        words: getattr(import_module(module), function)()
        for words, (module, function) in _PLACES.items()
    }
