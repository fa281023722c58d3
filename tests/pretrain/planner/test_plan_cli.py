"""``fmoe plan`` on the command line."""

import json
import subprocess
import sys

import pytest

from fmoe.cli import main, run
from pretrain.planner import cli


def test_json(capsys):
    assert main(["plan", "--flops", "1e20", "--law", "clark", "--json"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert planned["flops"] == 1e20
    assert set(planned["laws"]) == {"clark", "krajewski-64", "krajewski-16", "ludziejewski", "fmoe"}
    clark = planned["laws"]["clark"]
    assert clark["figures"]["experts"] == planned["recipe"]["moe"]["num_experts"] == 512
    assert clark["figures"]["tokens"] == 130e9


def test_gpu_days_are_flops(capsys):
    cli.main(["--gpu-days", "100", "--peak-flops", "1e15", "--mfu", "0.5"])
    assert capsys.readouterr().out.startswith("4.32e+21 FLOPs\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--flops 1", ("--flops=1 ", "1e+17", "1e+27")),
        ("--flops nan", ("--flops=nan",)),
        ("--flops ten", ("--flops", "'ten'")),
        ("--gpu-days 3", ("--gpu-days=3 ", "--peak-flops")),
        ("--gpu-days 3 --cluster h100-0", ("h100-0", "16384")),
        ("--flops 1e21 --cluster h100-8", ("--cluster=h100-8 ", "--gpu-days")),
        ("--gpu-days -3 --peak-flops 1e15", ("--gpu-days=-3 ", "0.001")),
        ("--gpu-days 3 --peak-flops 989", ("--peak-flops=989 ", "1e+09")),
        ("--gpu-days 3 --peak-flops 1e15 --mfu 35", ("--mfu=35 ", "0.01 and 1")),
        ("--flops 1e20 --max-params 0", ("--max-params=0 ", "1e+06")),
        ("--flops 1e20 --max-params 1e6", ("--law=ludziejewski", "1e+20", "1e+06")),
        ("--flops 1e17 --max-params 1e6 --law krajewski-64", ("--law=krajewski-64",)),
        ("--flops 1e20 --law kaplan", ("--law", "kaplan", "ludziejewski")),
        ("--flops 1e20 --gpu-days 3", ("--flops", "--gpu-days")),
        ("", ("--flops", "--gpu-days")),
    ],
)
def test_errors_are_one_line(words, parts, capsys):
    try:
        code = run("fmoe plan", lambda: cli.main(words.split()))
    except SystemExit as exit:  # of argparse
        code = exit.code
    assert code == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert all(part in message for part in parts), message


def test_torch_is_not_imported():
    program = (
        "import sys; from pretrain.planner.cli import main; main(['--flops', '1e20']); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("\nFalse\n")


def test_days_on_a_cluster_count_with_its_peak(capsys):
    cli.main(["--gpu-days", "100", "--cluster", "h100-256", "--json"])
    of_cluster = capsys.readouterr().out
    cli.main(["--gpu-days", "100", "--peak-flops", "989e12", "--json"])
    assert of_cluster == capsys.readouterr().out


def test_calibration_is_a_command_of_the_planner(capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["calibrate", "--help"])
    assert end.value.code == 0 and "--quick" in capsys.readouterr().out
