"""``python -m flodl_fast completion``: what bash or zsh needs to complete ``flodl-fast``, made by shtab."""

from __future__ import annotations

import argparse
from typing import Any

from .console import missing

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options to a parser."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = """\
to have it in every shell:
  bash  flodl-fast completion bash > ~/.local/share/bash-completion/completions/flodl-fast
  zsh   flodl-fast completion zsh > ~/.zfunc/_flodl-fast    with  fpath+=~/.zfunc  before compinit in ~/.zshrc
"""
    parser.add_argument("shell", choices=("bash", "zsh"))


def run(args: argparse.Namespace) -> int:
    """Print the shell's script and return the exit code."""
    try:
        import shtab
    except ImportError:
        return missing("shtab", "cli")
    from .cli import COMMANDS, build_parser

    parser = build_parser(COMMANDS)
    for action, options in _files(parser):
        action.complete = options  # type: ignore[attr-defined]
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _files(parser: argparse.ArgumentParser) -> list[tuple[argparse.Action, dict[str, Any]]]:
    """The arguments that are files, those of sub-commands included, each with shtab's word for it."""
    import shtab

    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                found += _files(sub)
        elif action.metavar in ("FILE", "PNG"):
            found.append((action, shtab.FILE))
    return found
