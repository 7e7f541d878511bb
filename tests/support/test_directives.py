"""The readers of directives refuse what a scheduler would refuse or misread."""

from __future__ import annotations

import pytest
from support.directives import WrongDirectiveError, read_lsf, read_slurm


def test_directives_end_at_the_first_command() -> None:
    script = '#!/bin/bash\n# words\n#SBATCH --nodes=2\n#SBATCH --output="/a b/%j.log"\n\necho\n'

    assert read_slurm(script) == {"--nodes": "2", "--output": "/a b/%j.log"}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("-nodes 2", "unknown option"),
        ("-W 2:00:00", "bad value"),
        ("-W 2:75", "bad value"),
        ("-nnodes 0", "bad value"),
        ("-nnodes", "bad value"),
        ("-r 1", "bad value"),
        ("-J $NAME", "replace no variables"),
        ("-J `id`", "replace no variables"),
        ("-J one two", "quote them"),
        ("-J 'one", "No closing quotation"),
        ("-wa USR1", "go together"),
        ("-wt 5", "go together"),
        ("-Q 75\n#BSUB -Q 75", "given twice"),
        ("", "an empty directive"),
        ("-r\necho\n#BSUB -x", "behind the first command"),
    ],
)
def test_a_wrong_directive_of_lsf_is_refused(line: str, message: str) -> None:
    with pytest.raises(WrongDirectiveError, match=message):
        read_lsf(f"#!/bin/bash\n#BSUB {line}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--node=2", "unknown option"),
        ("--time=2:00", "bad value"),
        ("--signal=USR1@60", "bad value"),
        ("--requeue=1", "bad value"),
        ("--job-name=$NAME", "replace no variables"),
    ],
)
def test_a_wrong_directive_of_slurm_is_refused(line: str, message: str) -> None:
    with pytest.raises(WrongDirectiveError, match=message):
        read_slurm(f"#!/bin/bash\n#SBATCH {line}\n")


def test_a_script_says_who_reads_it() -> None:
    with pytest.raises(WrongDirectiveError, match="no interpreter"):
        read_lsf("#BSUB -r\n")
