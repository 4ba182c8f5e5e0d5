"""completion: what bash and zsh make of it when somebody presses the tab key."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
import time

import pytest

from flodl_fast.cli import main

SECONDS = 120


def script(shell, capsys):
    pytest.importorskip("shtab", reason="shtab is not installed: pip install 'flodl_fast[cli]'")
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def typed(command, setup, lines, cwd):
    """What an interactive shell prints for lines that are typed into it, until it says that it is done."""
    main_end, child_end = pty.openpty()
    env = {"PATH": os.environ["PATH"], "HOME": str(cwd), "TERM": "dumb", "PS1": ""}
    process = subprocess.Popen(
        command, stdin=child_end, stdout=child_end, stderr=child_end, env=env, cwd=cwd, start_new_session=True
    )
    os.close(child_end)
    try:
        out = b""
        for line in (*setup, "print_ready", *lines, "print_done"):
            os.write(main_end, line.encode() + b"\n")
            wanted = {"print_ready": b"READY!", "print_done": b"DONE!"}.get(line)
            end = time.monotonic() + SECONDS
            while wanted is not None and wanted not in out:
                assert time.monotonic() < end, out.decode(errors="replace")
                out += os.read(main_end, 65536)
        return re.findall(r"GOT:(?!%)(.*?)<", out.decode(errors="replace"))
    finally:
        process.kill()
        process.wait()
        os.close(main_end)


# The command itself shows what it was given; words that tell the end are made up so that the echo does not hold them.
SETUP = [
    "flodl-fast() { printf 'GOT:%s<\\n' \"$*\"; }",
    "print_ready() { printf 'READ%s!\\n' Y; }",
    "print_done() { printf 'DON%s!\\n' E; }",
]
LINES = [
    "flodl-fast insp\tX", "flodl-fast inspect --sum\tX", "flodl-fast inspect --framing prefixed-c\tX",
    "flodl-fast inspect traf\tX", "flodl-fast completion z\tX",
]
EXPECTED = ["inspect X", "inspect --summary X", "inspect --framing prefixed-control X", "inspect traffic.pcap X",
            "completion zsh X"]


def test_bash(tmp_path, capsys):
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("bash is not installed")
    (tmp_path / "flodl-fast.bash").write_text(script("bash", capsys))
    (tmp_path / "traffic.pcap").touch()
    got = typed([bash, "--norc", "--noprofile", "-i"], [*SETUP, "source ./flodl-fast.bash"], LINES, tmp_path)
    assert got == EXPECTED


def test_zsh(tmp_path, capsys):
    zsh = shutil.which("zsh")
    if zsh is None:
        pytest.skip("zsh is not installed")
    (tmp_path / "_flodl-fast").write_text(script("zsh", capsys))
    (tmp_path / "traffic.pcap").touch()
    setup = [*SETUP, f"fpath=({tmp_path} $fpath)", "autoload -Uz compinit", "compinit -u"]
    assert typed([zsh, "-f", "-i"], setup, LINES, tmp_path) == EXPECTED


def test_every_command_and_option_is_there(capsys):
    text = script("bash", capsys)
    for word in ("encode", "inspect", "top", "bench", "demo", "join", "--salt-file", "--interval", "--devices"):
        assert word in text


def test_without_shtab(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err == "shtab is not installed: pip install 'flodl_fast[cli]'\n"


def test_wrong_use(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["completion", "fish"])
    assert caught.value.code == 2
    assert "usage: flodl-fast completion" in capsys.readouterr().err
