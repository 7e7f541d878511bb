"""`axsparse submit`: its refusals, the scripts it fills in, and how their jobs end.

Here bash runs the loop of a script among commands that say what ranks and nodes do; `make
test-slurm` has a real scheduler.
"""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest
from support.commands import Axsparse

from axsparse.cli import submit as command
from axsparse.config.load import packaged_folder
from axsparse.runtime.errors import ConfigError, MissingInputError
from axsparse.runtime.files.paths import expanded

ALL = tuple(command.SCHEDULERS)
STAGES = ("--set", "layout.g_inter=auto")
ASKED = (
    *("--ranks", "2", "--nodes", "2", "--time", "1:00:00"),
    *(*STAGES, "--config", "quickstart.yaml"),
)
SLURM = ("--slurm", *ASKED)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder, with a scheduler on PATH that takes any job, unless a file forbids it."""
    folder = tmp_path / "my é"
    folder.mkdir()
    monkeypatch.chdir(folder)
    sbatch = tmp_path / "sbatch"
    sbatch.write_text(
        f"""#!/bin/sh
[ ! -e '{tmp_path}/refuses' ] || {{ echo "slurm: error: Invalid account" >&2; exit 1; }}
echo "Submitted batch job 41"
"""
    )
    sbatch.chmod(0o755)
    (tmp_path / "python").symlink_to("/bin/true")
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("PMI_RANK", "SLURM_PROCID", "AXSPARSE_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def submit(axsparse: Axsparse) -> Axsparse:
    """`submit("--slurm", …)`: exit code, screen and errors."""
    return lambda *words: axsparse("submit", *words)


@pytest.fixture
def scheduler(request: pytest.FixtureRequest) -> str:
    """SLURM, unless a test asks for each."""
    return getattr(request, "param", "slurm")


@pytest.fixture
def script(scheduler: str, here: Path, submit: Axsparse) -> str:
    """The script of a job of two ranks on two nodes, which train in `here/r`."""
    return submit(f"--{scheduler}", *ASKED, "--run-dir", "r")[1]


def directives(script: str) -> str:
    """The options of a script, which stand before all commands, as its scheduler reads them."""
    first, *rest = script.splitlines()
    head = list(itertools.takewhile(lambda line: line.startswith("#"), rest))
    found = [re.fullmatch(r"#(?:SBATCH|BSUB|PBS|flux:) (.*)", line) for line in rest]
    assert first == "#!/bin/bash" and not any(found[len(head) :])
    return " ".join(each[1] for each in found if each)


# --- refusals ----------------------------------------------------------------------------


def test_a_scheduler_says_itself_why_it_takes_no_job(
    here: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.parent / "refuses").touch()
    job = command.parser().parse_args([*SLURM, "--now"])

    with pytest.raises(ConfigError, match=r"^sbatch: exit code 1; change what it names above, see"):
        command._submit(job)
    assert capfd.readouterr().err == "slurm: error: Invalid account\n"
    monkeypatch.setenv("PATH", str(here))
    line = (
        "sbatch: no such command; submit from a login node of the cluster, or print the script "
        "without --now"
    )
    with pytest.raises(MissingInputError, match=f"^{line}$"):
        command._submit(job)


# --- the text of the script --------------------------------------------------------------

PYTHON = sys.executable
EIGHT = ("--nodes", "2", "--ranks", "8", "--gpus-per-node", "4", "--time", "2:00:00")
NAMED = ("--account", "abc123", "--queue", "batch", "--run-dir", "/s/gpt")
TRAINED = (*STAGES, "--config", "quickstart.yaml")


@pytest.mark.parametrize("name", ALL)
def test_a_template_fits_a_screen_and_all_have_one_loop(name: str) -> None:
    texts = {one: (packaged_folder("launch") / f"{one}.sh").read_text() for one in ALL}

    assert len(texts[name].splitlines()) <= 65
    assert texts[name].partition("\nsaved")[2] == texts["slurm"].partition("\nsaved")[2]


DIRECTIVES = {
    "slurm": "--job-name=quickstart --nodes=2 --ntasks-per-node=4 --cpus-per-task=7 "
    "--gpus-per-node=4 --time=2:00:00 --signal=B:USR1@300 --no-kill --requeue --open-mode=append "
    "--output=%x-%j.log --account=abc123 --partition=batch",
    "lsf": '-J quickstart -n 56 -R "span[ptile=28]" -gpu "num=4" -W 120 -r -o quickstart-%J.log '
    "-P abc123 -q batch",
    "pbs": "-N quickstart -S /bin/bash -l select=2:ncpus=28:mpiprocs=4:ngpus=4 -l place=scatter "
    "-l walltime=2:00:00 -W tolerate_node_failures=all -j oe -k doe -A abc123 -q batch",
    "flux": "--job-name=quickstart --nodes=2 --exclusive --time-limit=120m "
    "--output=quickstart-{{id}}.log --bank=abc123 --queue=batch",
}
"""By the manuals that the templates name."""


@pytest.mark.parametrize("name", ALL)
def test_directives_say_what_the_job_asks_for(name: str, here: Path, submit: Axsparse) -> None:
    code, script, errors = submit(f"--{name}", *EIGHT, *NAMED, *TRAINED)

    assert (code, errors) == (0, "")
    assert directives(script) == DIRECTIVES[name]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert re.findall(r"@[a-z_]+@", script) == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "there", "gone"),
    [
        ("--lsf --time 1:00:01", "-W 61", "-W 120"),
        ("--lsf --gpus-per-node 0 --directive=-x", "-q batch -x", "-gpu"),
        ("--pbs --gpus-per-node 0", "-l select=2:ncpus=4:mpiprocs=4 ", "ngpus"),
        ("--pbs --directive='-l filesystems=home:eagle'", "-l filesystems=home:eagle", "@"),
        ("--slurm --gpus-per-node 0", "--nodes=2", "--gpus-per-node"),
        ("--slurm --time 48:00:00", "--time=48:00:00", "--time=2"),
        ("--slurm --gpus-per-node 2", "--cpus-per-task=3", "@directives@"),
        ("--slurm --set train.threads=9", "--cpus-per-task=9", "--cpus-per-task=7"),
        ("--slurm --cpus-per-rank 1", "--cpus-per-task=1 ", "--cpus-per-task=7"),
        (
            "--slurm --directive=--constraint=gpu --directive=--exclusive",
            "--constraint=gpu --exclusive",
            "@directives@",
        ),
        ("--flux --directive=--requires=host:a[1-2]", "--requires=host:a[1-2]", "@directives@"),
    ],
)
def test_directives_follow_the_options(
    words: str, there: str, gone: str, here: Path, submit: Axsparse
) -> None:
    given = shlex.split(words)
    usual = zip(EIGHT[::2], EIGHT[1::2], strict=True)
    eight = [word for option in usual if option[0] not in given for word in option]
    found = directives(submit(*eight, *NAMED, *TRAINED, *given)[1])

    assert there in found and gone not in found


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({}, "replica=1 fewer=(--set=layout.g_inter=auto"),
        ({"g_inter": 2}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_inter": 2, "g_data": 4}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_data": 2}, "replica=4 fewer=(--set=layout.g_inter=4"),
        ({"g_data": 2, "g_tensor": 2}, "replica=4 fewer=(--set=layout.g_inter=2"),
        ({"g_tensor": 2}, "replica=2 fewer=(--set=layout.g_inter=auto"),
        ({"split": "[3, 5]"}, "replica=2 fewer=(--set=layout.g_inter=2"),
    ],
    ids=str,
)
def test_fewer_nodes_train_fewer_replicas_of_the_same_stages(
    asked: dict[str, object], line: str, here: Path, submit: Axsparse
) -> None:
    words = [f"--set=layout.{key}={value}" for key, value in asked.items()]

    script = submit("--slurm", *EIGHT, *TRAINED, *words)[1]

    assert f" {line} --set=layout.g_data=auto) #" in script


def test_the_job_is_called_like_the_configuration(here: Path, submit: Axsparse) -> None:
    (here / "-my é.yaml").write_text("seed: 1\n")

    script = submit(*SLURM[:-2], "--config=-my é.yaml")[1]

    assert directives(script).startswith("--job-name=my__ ")


def test_the_environments_own_mpirun_starts_ranks(here: Path, submit: Axsparse) -> None:
    assert "start() { exec mpirun --host" in submit(*SLURM)[1]
    own = Path(sys.executable).with_name("mpirun")
    own.touch()
    assert f"start() {{ exec {shlex.quote(str(own))} --host" in submit(*SLURM)[1]


def test_a_path_of_any_bytes_is_handed_on(here: Path) -> None:
    (here / os.fsdecode(b"\xff\xc3\xa9.yaml")).write_text("seed: 1\n")
    words = [*SLURM[:-2], os.fsdecode(b"--config=\xff\xc3\xa9.yaml")]

    command._submit(command.parser().parse_args([*words, "--now"]))

    assert b"'--config=\xff\xc3\xa9.yaml'" in next((here / "runs").glob("*.sh")).read_bytes()


# --- the loop of a script ----------------------------------------------------------------

CLUSTER = Path(__file__).with_name("cluster.sh").read_text(encoding="utf-8")
"""Commands of clusters, as their manuals have them: ranks end as the next line of a file says, and
perhaps save a step; `sleep` says its seconds before another try. sbatch(1) and qsub(1B) take a
path, bsub(1) stdin; scontrol(1) show hostnames; srun(1) -w; blaunch(1) and pbs_tmrsh(8B) a host and
a command; flux-hostlist(1), flux-run(1)."""


def job(
    here: Path,
    script: str,
    *ends: str,
    gone: str = "",
    hosts: str = "n1 n2",
    save_at: int = 3600,
    log: int | IO[str] = subprocess.PIPE,
) -> str:
    """The output of a job's script whose ranks end so, and the code that it ends with."""
    (here / "next").write_text("".join(f"{end}\n" for end in ends))
    for before, after in (("save_at=", f"save_at={save_at} was="), ("pause=30", "pause=1")):
        assert before in script
        script = script.replace(before, after, 1)
    (here / "job.sh").write_text(script)
    (here / "nodes").write_text(hosts.replace(" ", "\n"))
    environment = {
        **os.environ,
        **{"HOSTS": hosts, "GONE": gone, "HERE": str(here), "SLURM_JOB_NODELIST": "n"},
        **{"LSB_MCPU_HOSTS": hosts.replace(" ", " 1 ") + " 1", "PBS_NODEFILE": str(here / "nodes")},
    }
    done = subprocess.run(
        ["bash", "-c", CLUSTER + script, str(here / "job.sh")],
        env=environment,
        stdout=log,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{done.stdout or ''}{done.returncode}"


AGAIN = "axsparse: 2 ranks on 2 of 2 nodes\n"
FAILED = "axsparse: error: failed 5 times without a new checkpoint\n"


def test_a_job_says_that_another_script_than_its_own_follows_it(here: Path, script: str) -> None:
    said = f"axsparse: note: {here}/r.sh, which is submitted again, differs from this job's script"

    assert said not in job(here, script, "0")
    (here / "r.sh").write_text("# edited")
    assert said in job(here, script, "0")


@pytest.mark.parametrize(
    ("ends", "waits", "last"),
    [
        (["0"], [], "0\n0"),
        *((["1 2", code], [1], f"{code}\n{code}") for code in ("65", "66", "78")),
        (["137 2", "137 4", "0"], [1, 1], "0\n0"),
        (["1", "1", "1 2", "1", "0"], [2, 4, 1, 2], "0\n0"),
        (["75 2"], [], "75\n75"),
        # A damaged checkpoint is passed over, and its step saved again and again.
        (["74 2"] * 6, [1, 2, 4, 8, 16], f"74\n{FAILED}74"),
        # The run passes over a damaged checkpoint of step 67.
        (["137 67", *(f"1 {step}0" for step in range(1, 6)), "0"], [1] * 6, "0\n0"),
        # The checkpoints are those of another job, which uses the directory.
        ([f"73 {step}" for step in range(1, 6)], [2, 4, 8, 16], f"73\n{FAILED}73"),
        (["1"] * 5, [2, 4, 8, 16], f"1\n{FAILED}1"),
    ],
    ids=str,
)
def test_a_job_goes_on_until_it_is_done_or_would_only_repeat_itself(
    ends: list[str], waits: list[int], last: str, here: Path, script: str
) -> None:
    found = job(here, script, *ends)

    again = "".join(
        f"{AGAIN}ranks end with {end.split()[0]}\n{'1' * wait}"
        for end, wait in zip(ends, waits, strict=False)
    )
    assert found == f"{again}{AGAIN}ranks end with {last}"


def test_a_job_ends_though_nobody_can_log_it(here: Path, script: str) -> None:
    with Path("/dev/full").open("w") as full:
        assert job(here, script, *["1"] * 9, log=full) == "1"
        assert job(here, script, save_at=0, log=full) == "70"


def test_the_shell_options_and_variables_of_a_setup_file_do_not_reach_the_loop(
    here: Path, submit: Axsparse
) -> None:
    names = "script run_dir train nodes per_node replica fewer save_at margin pause most code"
    options = (
        "cd /\nset -CEefkuo pipefail\nset -o posix\nshopt -s failglob\nIFS=x\ntrap 'exit 3' ERR\n"
        "GLOBIGNORE='*'\n"
    )
    (here / "setup.sh").write_text(f"for each in {names}; do declare $each=x; done\n{options}")
    script = submit(*SLURM, "--run-dir", "r", "--setup", "setup.sh")[1]

    assert job(here, script, "1 2", "0") == f"{AGAIN}ranks end with 1\n1{AGAIN}ranks end with 0\n0"
    assert (here / "arguments").read_text().startswith(f"{here}\n")
    many = "/".join(["r" * 60] * 3) + "/r"  # whose checkpoints fill more than a pipe takes at once
    script = submit(*SLURM, "--run-dir", many, "--setup", "setup.sh")[1]
    for step in range(200):
        (here / many / "checkpoints" / f"step-{step}").mkdir(parents=True)
        (here / many / "checkpoints" / f"step-{step}" / "manifest.json").touch()
    script = script.replace("seen=$(saved)", "seen=''", 1)
    assert job(here, script, *["1"] * 5, "0").endswith("ranks end with 0\n0")
    script = submit(*SLURM, "--run-dir", "r", "--setup", "setup.sh")[1]
    said = "axsparse: error: --setup ends the job: it has an exit, or its last command failed\n"
    for end, code in (("false", 78), ("exit 0", 78), ("exit 74", 74), ("set -e; false; true", 1)):
        (here / "setup.sh").write_text(f"{end}\n")
        assert job(here, script, "0") == f"{said}{code}"
    (here / "setup.sh").write_text("trap 'echo cleared' EXIT\n")
    assert job(here, script, "0") == f"{AGAIN}ranks end with 0\ncleared\n0"


@pytest.mark.parametrize("name", ALL)
def test_a_script_names_all_that_it_sets_after_a_setup_file(name: str) -> None:
    text = (packaged_folder("launch") / f"{name}.sh").read_text()
    (checked,) = re.findall(r"unset -v (.*?); unset -f (.*?);", text)
    text = re.sub(r"\{ echo .*?\}|--?\w[\w-]*=|#.*", "", text.partition("\nset +")[2])
    names = re.findall(r"(?<![\w.$-])([A-Za-z_]+)\+?=|\bfor (\w+) in|\(\((\w+) =", text)

    assert {one for found in names for one in found if one} <= {*checked[0].split()}
    assert {*re.findall(r"^(\w+)\(\)", text, re.M)} == {*checked[1].split()}


@pytest.mark.parametrize(
    ("setup", "said"),
    [
        ("readonly run_dir=/scratch/own", "run_dir: "),
        ("set -eux; declare -r code=1", "code: "),
        ("set -x; start() { true; }; readonly -f start", "start: "),
        ("set -eux; readonly own=1 RUN_DIR=2; shopt -s expand_aliases; alias export='exit 1'", ""),
    ],
)
def test_a_setup_file_that_makes_a_name_of_the_loop_readonly_ends_the_job(
    setup: str, said: str, here: Path, submit: Axsparse
) -> None:
    (here / "setup.sh").write_text(f"{setup}\n")

    lines = job(here, submit(*SLURM, "--run-dir", "r", "--setup", "setup.sh")[1], "0").split("\n")

    assert lines[-1] == ("78" if said else "0")
    errors = [line for line in lines if "axsparse: error" in line]
    assert not said or re.fullmatch(
        f"axsparse: error: {said}cannot unset: readonly .*, and this script sets it; have --setup "
        "use another name",
        errors[-1],
    )


def test_the_clock_of_a_job_counts_its_setup(here: Path, submit: Axsparse) -> None:
    (here / "setup.sh").write_text("command sleep 3; SECONDS=0\n")
    script = submit(*SLURM, "--run-dir", "r", "--setup", "setup.sh")[1]

    said = "axsparse: error: no new checkpoint in this job, so none follows it\n70"
    assert job(here, script, "0", save_at=2) == said


def test_a_job_that_cannot_begin_does_not_try_again(here: Path, script: str) -> None:
    Path(sys.executable).unlink()

    found = job(here, script, "0")
    assert re.fullmatch(r".*/job.sh: line \d+: .*/python: No such file or directory\n127", found)
    Path(sys.executable).write_text(f'#!/bin/sh\nexec {shlex.quote(PYTHON)} "$@"\n')
    Path(sys.executable).chmod(0o755)
    found = job(here, script.replace("quickstart.yaml", "gone.yaml"), "0")
    assert re.fullmatch(r"axsparse: error: config 'gone.yaml': .*\n66", found)


@pytest.mark.parametrize("scheduler", ALL, indirect=True)
def test_a_script_that_was_removed_while_its_job_ran_is_there_again_for_the_next(
    here: Path, script: str
) -> None:
    end = f'rm -f "{here}/r.sh"; save_at=0; wait "$pid";'
    assert script.count('wait "$pid";') == 1

    found = job(here, script.replace('wait "$pid";', end), "137 2")

    assert found.endswith("submitted again\n75")
    assert (here / "r.sh").read_text() == (here / "job.sh").read_text()


def test_a_run_directory_that_is_away_is_no_progress(here: Path, script: str) -> None:
    (here / "r" / "checkpoints" / "step-3").mkdir(parents=True)
    (here / "r" / "checkpoints" / "step-3" / "manifest.json").touch()
    script = script.replace("start() {", "start() { rm -rf r;")

    assert job(here, script, *["74"] * 9).count("ranks end with 74") == 5


def test_a_script_that_cannot_be_copied_is_not_there(here: Path, script: str) -> None:
    found = job(here, script.replace("cp --", "ulimit -f 1; cp --"), "0")

    assert found.endswith("ranks end with 0\n0")
    assert not (here / "r.sh").exists()


def test_nodes_that_do_not_answer_say_why(here: Path, script: str) -> None:
    assert "no_srun: command not found" in job(here, script.replace(" srun -Q", " no_srun"))


@pytest.mark.parametrize("scheduler", ALL, indirect=True)
def test_a_job_whose_time_is_over_submits_itself_again(here: Path, script: str) -> None:
    script = script.replace('wait "$pid";', "save_at=0; wait $pid;")

    assert job(here, script, "75 2") == f"{AGAIN}ranks end with 75\nsubmitted again\n75"
    assert (here / "r.sh").is_file()


@pytest.mark.parametrize("name", ALL)
def test_where_a_node_is_gone_fewer_replicas_go_on(name: str, here: Path, submit: Axsparse) -> None:
    script = submit(f"--{name}", *ASKED, "--set", "layout.g_data=2", "--run-dir", "r")[1]

    assert job(here, script, "0", gone="n2") == (
        "axsparse: 1 ranks on 1 of 2 nodes\nranks end with 0\n0"
    )
    words = (here / "arguments").read_text().splitlines()
    one = ["-N1", "-n1", "-c1", "--exclusive", "--requires=host:n1"]
    assert words[1 : words.index(sys.executable)] == (
        one if name == "flux" else ["--host", "n1:1", "-n", "1"]
    )
    assert words[-2:] == ["--set=layout.g_inter=1", "--set=layout.g_data=auto"]


@pytest.mark.parametrize("name", ALL)
def test_the_nodes_that_are_left_may_be_more_than_whole_replicas_need(
    name: str, here: Path, submit: Axsparse
) -> None:
    words = ("--ranks", "4", "--nodes", "4", "--time", "1:00:00", "--config", "quickstart.yaml")
    script = submit(f"--{name}", *words, "--set", "layout.g_inter=2", "--run-dir", "r")[1]

    found = job(here, script, "0", gone="n3", hosts="n1 n2 n3 n4")

    assert found == "axsparse: 2 ranks on 3 of 4 nodes\nranks end with 0\n0"


def test_where_the_ranks_of_fewer_nodes_have_no_layout_fewer_ranks_go_on(
    here: Path, submit: Axsparse
) -> None:
    script = submit("--slurm", *EIGHT, *TRAINED, "--run-dir", "r")[1]
    tries = [f"axsparse: {count} ranks on 1 of 2 nodes\n" for count in (4, 3, 2, 1)]
    unfit, none = "ranks end with 78\n", "axsparse: 0 ranks on 1 of 2 nodes\n"

    found = job(here, script, "78", "78", "78", "0", gone="n2")
    assert found == f"{f'{unfit}1'.join(tries)}ranks end with 0\n0"
    waits = [f"{'1' * wait}{none}" for wait in (2, 4, 8, 16)]
    found = job(here, script, *["78"] * 4, gone="n2")
    assert found == f"{f'{unfit}1'.join(tries)}{unfit}{''.join(waits)}{FAILED}70"
    batch = ("--set", "batch.global_batch_size=320")
    script = submit("--slurm", "--ranks", "80", *ASKED[2:], *batch, "--run-dir", "r")[1]
    counts = re.findall(r"(\d+) ranks on 1 of 2", job(here, script, *["78"] * 40, gone="n2"))
    assert [*map(int, counts)][:12] == [*range(40, 32, -1), 32, 28, 24, 16]


@pytest.mark.parametrize("scheduler", ALL, indirect=True)
def test_ranks_that_have_ended_by_themselves_are_stopped_silently(here: Path, script: str) -> None:
    end = 'save_at=0 margin=0; while kill -0 "$pid" 2>/dev/null; do :; done'
    script = script.replace("      sleep 1\n", f"      {end}\n")

    assert job(here, script, "75 2") == f"{AGAIN}ranks end with 75\nsubmitted again\n75"


def test_a_cancelled_job_waits_for_its_ranks_and_none_follows(here: Path, script: str) -> None:
    script = script.replace('wait "$pid";', 'kill -TERM $$; wait "$pid";')

    assert job(here, script, "75 2") == f"{AGAIN}ranks end with 75\n75"


@pytest.mark.parametrize("scheduler", ALL, indirect=True)
def test_a_script_that_is_no_job_says_so(scheduler: str, here: Path, script: str) -> None:
    (here / "r.sh").write_text(script)
    environment = {key: value for key, value in os.environ.items() if key != "SLURM_JOB_NODELIST"}

    done = subprocess.run(
        ["bash", "r.sh"], env=environment, capture_output=True, text=True, check=False
    )

    said = f"axsparse: error: this is no job of {scheduler}; submit it: "
    assert done.stderr.lower().startswith(said) and done.stderr.count("\n") == 1
    assert (done.returncode, done.stdout) == (78, "")


HARD = "data.path=a  b/$HOME/`id`/'\"/*/é/\\n/@ranks@/!x"


def test_values_arrive_at_the_ranks_as_they_were_given(here: Path, submit: Axsparse) -> None:
    (here / "my conf").mkdir()
    (here / "my conf" / "-é 'x;.yaml").write_text("data: {source: tokens}\n")
    (here / "my modules.sh").write_text("echo modules are loaded\npython=/bin/true\n")
    config = str(here / "my conf" / "-é 'x;.yaml")
    options = ["--config", config, "--set", HARD, "--steps", "6", "--run-dir", "my run"]

    script = submit("--slurm", *ASKED[:-2], *options, "--setup", "my modules.sh")[1]

    assert job(here, script, "0").startswith("modules are loaded\n")
    folder, *words = (here / "arguments").read_text().splitlines()
    assert folder == str(here)
    assert words[words.index("axsparse.train") - 2] == "/bin/true"
    assert words[words.index("axsparse.train") + 1 :] == [
        *(f"--config={config}", "--set=layout.g_inter=auto", f"--set={HARD}"),
        *("--set=train.steps=6", "--run-dir=./my run", "--resume=auto"),
    ]


# --- submitting --------------------------------------------------------------------------


def test_a_folder_of_any_name_is_the_runs(
    here: Path, submit: Axsparse, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("$HOME", "~"):
        (here / folder).mkdir()
        monkeypatch.chdir(here / folder)
        script = submit(*SLURM, "--run-dir", "./~x")[1]
        run_dir = shlex.split(re.findall("^run_dir=(.*?) #", script, re.M)[0])[0]
        assert expanded(run_dir) == run_dir and Path(run_dir) == Path("~x")
    assert "\nrun_dir=/s/gpt #" in submit(*SLURM, "--run-dir", "/s/gpt")[1]


def test_a_job_gets_a_new_folder_unless_one_is_named(here: Path, submit: Axsparse) -> None:
    screens = []
    for more in ([], [], ["--run-dir", "mine"], ["--set", "run_dir=mine"]):
        code, screen, _ = submit(*SLURM, *more, "--now")
        assert code == 0
        screens.append(screen)

    assert screens == [
        f"script → {here}/{name}.sh\n"
        for name in ("runs/quickstart", "runs/quickstart-2", "mine", "mine")
    ]
    assert "\nscript=/.sh #" in submit(*SLURM, "--run-dir", "/")[1]


def test_printed_scripts_of_other_settings_have_other_folders(here: Path, submit: Axsparse) -> None:
    rates = (("--set", f"optimizer.learning_rate={rate}") for rate in ("1e-3", "3e-4", "1e-3"))
    found = [re.findall("^run_dir=(.*?) #", submit(*SLURM, *rate)[1], re.M)[0] for rate in rates]

    assert found[0] == found[2] != found[1]
    assert all(path.startswith("./runs/quickstart-") for path in found)


def test_a_script_that_somebody_has_edited_is_kept(here: Path, submit: Axsparse) -> None:
    script = here / "mine.sh"
    for number in (1, 2):
        submit(*SLURM, "--run-dir", "mine", "--now")
        script.write_text(script.read_text() + f"# edited {number}\n")

    code, screen, _ = submit(*SLURM, "--run-dir", "mine", "--now")

    assert (code, screen) == (0, f"the earlier script → {script}.2\nscript → {script}\n")
    for number in (1, 2):
        assert script.with_name(f"mine.sh.{number}").read_text().endswith(f"# edited {number}\n")


# --- the command -------------------------------------------------------------------------


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = command.DESCRIPTION.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("axsparse ")]

    assert len(lines) == 3
    for line in lines:
        command.parser().parse_args(shlex.split(line.partition(">")[0])[2:])
