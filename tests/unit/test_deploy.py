"""What lies in deploy/ can be deployed: systemd takes the unit, `tierd serve` takes the config."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tierd.cli.main import app
from tierd.config import ServeOptions, parse_toml

DEPLOY = Path(__file__).parents[2] / "deploy"
UNIT = (DEPLOY / "tierd@.service").read_text()
SAMPLE = (DEPLOY / "tierd.toml").read_text()


def setting(name: str) -> str:
    """The one value of a unit file's setting."""
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, re.MULTILINE)
    return str(value)


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd on this machine")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tierd@.service"
    unit.write_text(UNIT.replace("/opt/tierd/bin/tierd", sys.executable))
    verify = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(tmp_path / "tierd@llama.service")],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (verify.returncode, verify.stdout, verify.stderr) == (0, "", "")


def test_the_unit_starts_a_command_that_exists_and_may_pin_its_memory() -> None:
    command = setting("ExecStart").split()[1:]
    text = CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "200"}).output
    assert command[0] == "serve"
    assert all(flag in text for flag in command if flag.startswith("--"))
    assert setting("LimitMEMLOCK") == "infinity"
    assert setting("Type") == "notify"


def test_the_unit_keeps_the_socket_in_a_directory_of_its_user_alone() -> None:
    socket = setting("ExecStart").split("--socket ")[1]
    assert socket == f"/run/{setting('RuntimeDirectory')}/tierd.sock"
    assert setting("RuntimeDirectoryMode") == "0700"


def test_the_sample_config_loads_as_it_is() -> None:
    assert parse_toml(SAMPLE) == ServeOptions(memory="64GiB")


def test_the_sample_config_shows_every_setting_with_a_value_that_loads() -> None:
    every_setting = re.sub(r"^# (?=[a-z-]+ = )", "", SAMPLE, flags=re.MULTILINE)
    options = parse_toml(every_setting)
    for name in ServeOptions.__dataclass_fields__:
        assert getattr(options, name) is not None, f"{name} is missing in deploy/tierd.toml"
