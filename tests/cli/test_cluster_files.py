"""The files for clusters, as far as they can be checked where there is none."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from lockstep.cli.command import parser

FOLDER = Path(__file__).parents[2] / "docs" / "cluster"
SBATCH = {
    "job-name",
    "nodes",
    "ntasks-per-node",
    "cpus-per-task",
    "time",
    "output",
    "gpus-per-task",
    "open-mode",
    "signal",
}
"""Options of sbatch, by its manual."""


def test_the_page_points_to_what_is_there() -> None:
    text = (FOLDER.parent / "processes.md").read_text()
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    assert len(links) > 3
    assert [link for link in links if not (FOLDER.parent / link).exists()] == []


@pytest.mark.parametrize("name", ["two-machines.sh", "slurm.sbatch", "slurm-requeue.sbatch"])
def test_the_shell_can_read_it(name: str) -> None:
    subprocess.run(["bash", "-n", FOLDER / name], check=True, timeout=240)


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm-requeue.sbatch"])
def test_the_options_of_the_batch_file_are_sbatchs(name: str) -> None:
    text = (FOLDER / name).read_text().replace("#SBATCH --requeue\n", "")
    used = re.findall(r"^#?#SBATCH --([a-z-]+)=\S+$", text, re.MULTILINE)
    assert len(used) == text.count("#SBATCH")
    assert set(used) <= SBATCH


def test_kubernetes_knows_every_word() -> None:
    documents = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))
    assert [each["kind"] for each in documents] == ["Service", "Job"]
    for document in documents:
        kubernetes_validate.validate(document, "1.31", strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(documents[1] | {"spek": 1}, "1.31", strict=True)


def test_the_commands_in_the_files_are_ours() -> None:
    shell = (FOLDER / "two-machines.sh").read_text()
    (line,) = re.findall(r"^exec lockstep (.*)$", shell, re.MULTILINE)
    options = parser().parse_args(shlex.split(line.replace("$1", "node0")))
    assert (options.nnodes, options.rdzv, options.script) == ("2", "node0:29400", "train.py")
    job = list(yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text()))[1]
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[0] == "lockstep"
    options = parser().parse_args(command[1:])
    assert (options.num_processes, options.rdzv, options.script) == ("2", "train-0.train:29400", "train.py")
