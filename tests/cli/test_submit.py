"""`axsparse submit`: its refusals, the scripts it fills in, and how their jobs end.

Here bash runs the loop of a script among commands that say what ranks and nodes do; `make
test-slurm` has a real scheduler.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import Axsparse

from axsparse.cli import submit as command
from axsparse.config.load import packaged_folder
from axsparse.runtime.errors import ConfigError, MissingInputError

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
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    for name in ("PMI_RANK", "SLURM_PROCID", "AXSPARSE_RANKS"):
        monkeypatch.delenv(name, raising=False)
    return folder


@pytest.fixture
def submit(axsparse: Axsparse) -> Axsparse:
    """`submit("--slurm", …)`: exit code, screen and errors."""
    return lambda *words: axsparse("submit", *words)


NAME = r"[A-Za-z0-9][\w.@:/+-]*"
COUNT = r"[1-9][0-9]*"
CLOCK = r"[0-9]+:[0-5][0-9]:[0-5][0-9]"
SBATCH = "slurm.schedmd.com/sbatch.html#OPT_"
BSUB = "ibm.com/docs/en/spectrum-lsf/10.1.0?topic=reference-bsub, option "
QSUB = "github.com/openpbs/openpbs, doc/man1/qsub.1B, option "
RESOURCES = "github.com/openpbs/openpbs, doc/man1/pbs_resources.7B, "
FLUX = "flux-framework.readthedocs.io/projects/flux-core, man1/flux-batch.html, "
MANUALS: dict[str, dict[str, tuple[str, str]]] = {
    "SBATCH": {
        "--job-name": (NAME, f"{SBATCH}job-name"),
        "--nodes": (COUNT, f"{SBATCH}nodes"),
        "--ntasks-per-node": (COUNT, f"{SBATCH}ntasks-per-node"),
        "--cpus-per-task": (COUNT, f"{SBATCH}cpus-per-task"),
        "--gpus-per-node": (COUNT, f"{SBATCH}gpus-per-node"),
        "--time": (CLOCK, f"{SBATCH}time: hours:minutes:seconds"),
        "--signal": (rf"B:USR1@{COUNT}", f"{SBATCH}signal: B: the batch shell alone; seconds"),
        "--no-kill": ("", f"{SBATCH}no-kill: a node that fails does not end the job"),
        "--requeue": ("", f"{SBATCH}requeue"),
        "--open-mode": ("append", f"{SBATCH}open-mode"),
        "--output": (r"%x-%j\.log", f"{SBATCH}output: %x is the name, %j the number"),
        "--account": (NAME, f"{SBATCH}account"),
        "--partition": (NAME, f"{SBATCH}partition"),
        "--constraint": (r".+", f"{SBATCH}constraint"),
        "--exclusive": ("", f"{SBATCH}exclusive"),
    },
    "BSUB": {
        "-J": (NAME, f"{BSUB}-J"),
        "-n": (COUNT, f"{BSUB}-n: slots over all hosts"),
        "-R": (rf"span\[ptile={COUNT}\]", f"{BSUB}-R, span string: slots of each host"),
        "-gpu": (rf"num={COUNT}", f"{BSUB}-gpu: num, by default of each host"),
        "-W": (COUNT, f"{BSUB}-W: [hour:]minute"),
        "-r": ("", f"{BSUB}-r: again where its host fails"),
        "-o": (rf"{NAME}-%J\.log", f"{BSUB}-o: %J is the number"),
        "-P": (NAME, f"{BSUB}-P"),
        "-q": (NAME, f"{BSUB}-q"),
        "-x": ("", f"{BSUB}-x"),
    },
    "PBS": {
        "-N": (NAME, f"{QSUB}-N: a letter or digit first, no white space"),
        "-S": ("/bin/bash", f"{QSUB}-S"),
        "-l select": (
            rf"{COUNT}:ncpus={COUNT}:mpiprocs={COUNT}(:ngpus={COUNT})?",
            f"{QSUB}-l: N:chunk; {RESOURCES}ncpus, mpiprocs; ngpus is the site's",
        ),
        "-l place": ("scatter", f"{QSUB}-l: free|pack|scatter"),
        "-l walltime": (CLOCK, f"{RESOURCES}walltime"),
        "-l filesystems": (r"[\w:]+", f"{QSUB}-l: resource_name=value, of the site"),
        "-W": ("tolerate_node_failures=all", f"{QSUB}-W; pbs_job_attributes.7B"),
        "-j": ("oe", f"{QSUB}-j"),
        "-k": ("doe", f"{QSUB}-k: d writes both streams to their last place at once"),
        "-A": (NAME, f"{QSUB}-A"),
        "-q": (NAME, f"{QSUB}-q"),
    },
    "flux:": {
        "--job-name": (NAME, f"{FLUX}job parameters"),
        "--nodes": (COUNT, f"{FLUX}job parameters"),
        "--exclusive": ("", f"{FLUX}job parameters: with --nodes"),
        "--time-limit": (rf"{COUNT}m", f"{FLUX}job parameters: minutes, or a number with a unit"),
        "--output": (rf"{NAME}-\{{\{{id\}}\}}\.log", f"{FLUX}standard I/O: templates"),
        "--bank": (NAME, f"{FLUX}other options"),
        "--queue": (NAME, f"{FLUX}job parameters"),
        "--requires": (r".+", f"{FLUX}constraints"),
    },
}
"""By how a directive begins: the options that we use, each with the pattern of its value and the
place of the scheduler's manual that says so."""


def read(script: str) -> dict[str, str]:
    """The options of a script's directives, as its scheduler would read them: a directive stands
    before all commands. An option of PBS's -l goes with its resource."""
    options: dict[str, str] = {}
    assert script.startswith("#!/bin/bash\n")
    assert not re.search(r"^[^#\n].*^#(SBATCH|BSUB|PBS|flux:) ", script, re.DOTALL | re.MULTILINE)
    for line in script.splitlines():
        if sentinel := re.match(r"#(SBATCH|BSUB|PBS|flux:) ", line):
            words = shlex.split(line)[1:]
            while words:
                name, equals, value = words.pop(0).partition("=")
                if not equals and words and not words[0].startswith("-"):
                    value = words.pop(0)
                if name == "-l":
                    resource, _, value = value.partition("=")
                    name = f"-l {resource}"
                assert name not in options, f"{name} is given twice"
                pattern, manual = MANUALS[sentinel[1]][name]
                assert re.fullmatch(pattern, value), f"{name}: {value!r}; see {manual}"
                options[name] = value
    return options


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

EIGHT = ("--nodes", "2", "--ranks", "8", "--gpus-per-node", "4", "--time", "2:00:00")
NAMED = ("--account", "abc123", "--queue", "batch", "--run-dir", "/s/gpt")
TRAINED = (*STAGES, "--config", "quickstart.yaml")


@pytest.mark.parametrize("name", ALL)
def test_a_template_fits_a_screen_and_all_have_one_loop(name: str) -> None:
    texts = {one: (packaged_folder("launch") / f"{one}.sh").read_text() for one in ALL}

    assert len(texts[name].splitlines()) <= 60
    assert texts[name].partition("\nnewest")[2] == texts["slurm"].partition("\nnewest")[2]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "slurm",
            {
                "--job-name": "quickstart",
                "--nodes": "2",
                "--ntasks-per-node": "4",
                "--cpus-per-task": "7",
                "--gpus-per-node": "4",
                "--time": "2:00:00",
                "--signal": "B:USR1@300",
                "--no-kill": "",
                "--requeue": "",
                "--open-mode": "append",
                "--output": "%x-%j.log",
                "--account": "abc123",
                "--partition": "batch",
            },
        ),
        (
            "lsf",
            {
                "-J": "quickstart",
                "-n": "56",
                "-R": "span[ptile=28]",
                "-gpu": "num=4",
                "-W": "120",
                "-r": "",
                "-o": "quickstart-%J.log",
                "-P": "abc123",
                "-q": "batch",
            },
        ),
        (
            "pbs",
            {
                "-N": "quickstart",
                "-S": "/bin/bash",
                "-l select": "2:ncpus=28:mpiprocs=4:ngpus=4",
                "-l place": "scatter",
                "-l walltime": "2:00:00",
                "-W": "tolerate_node_failures=all",
                "-j": "oe",
                "-k": "doe",
                "-A": "abc123",
                "-q": "batch",
            },
        ),
        (
            "flux",
            {
                "--job-name": "quickstart",
                "--nodes": "2",
                "--exclusive": "",
                "--time-limit": "120m",
                "--output": "quickstart-{{id}}.log",
                "--bank": "abc123",
                "--queue": "batch",
            },
        ),
    ],
)
def test_directives_say_what_the_job_asks_for(
    name: str, options: dict[str, str], here: Path, submit: Axsparse
) -> None:
    code, script, errors = submit(f"--{name}", *EIGHT, *NAMED, *TRAINED)

    assert (code, errors) == (0, "")
    assert read(script) == options
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert re.findall(r"@[a-z_]+@", script) == []
    assert list(here.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--lsf", "--time", "1:00:01"], {"-W": "61"}),
        (["--lsf", "--gpus-per-node", "0", "--directive=-x"], {"-gpu": None, "-x": ""}),
        (["--pbs", "--gpus-per-node", "0"], {"-l select": "2:ncpus=4:mpiprocs=4"}),
        (["--pbs", "--directive=-l filesystems=home:eagle"], {"-l filesystems": "home:eagle"}),
        (["--slurm", "--gpus-per-node", "0"], {"--gpus-per-node": None}),
        (["--slurm", "--time", "48:00:00"], {"--time": "48:00:00"}),
        (["--slurm", "--gpus-per-node", "2"], {"--cpus-per-task": "3"}),
        (["--slurm", "--set", "train.threads=9"], {"--cpus-per-task": "9"}),
        (["--slurm", "--cpus-per-rank", "1"], {"--cpus-per-task": "1"}),
        (
            ["--slurm", "--directive=--constraint=gpu", "--directive=--exclusive"],
            {"--constraint": "gpu", "--exclusive": ""},
        ),
        (["--flux", "--directive=--requires=host:a[1-2]"], {"--requires": "host:a[1-2]"}),
    ],
    ids=" ".join,
)
def test_directives_follow_the_options(
    words: list[str], options: dict[str, str | None], here: Path, submit: Axsparse
) -> None:
    script = submit(*EIGHT, *NAMED, *TRAINED, *words)[1]

    found = read(script)
    assert {name: found.get(name) for name in options} == options


@pytest.mark.parametrize(
    ("asked", "line"),
    [
        ({}, "replica=1 fewer=(--set=layout.g_inter=auto"),
        ({"g_inter": 2}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_inter": 2, "g_data": 4}, "replica=2 fewer=(--set=layout.g_inter=2"),
        ({"g_data": 2}, "replica=4 fewer=(--set=layout.g_inter=4"),
        ({"g_data": 2, "g_tensor": 2}, "replica=4 fewer=(--set=layout.g_inter=2"),
        ({"g_tensor": 2}, "replica=2 fewer=(--set=layout.g_inter=auto"),
    ],
    ids=str,
)
def test_fewer_nodes_train_fewer_replicas_of_the_same_stages(
    asked: dict[str, int], line: str, here: Path, submit: Axsparse
) -> None:
    words = [f"--set=layout.{key}={value}" for key, value in asked.items()]

    script = submit("--slurm", *EIGHT, *TRAINED, *words)[1]

    assert f" {line} --set=layout.g_data=auto) #" in script


def test_the_job_is_called_like_the_configuration(here: Path, submit: Axsparse) -> None:
    (here / "-my é.yaml").touch()

    script = submit(*SLURM, "--config=-my é.yaml")[1]

    assert read(script)["--job-name"] == "my__"


def test_the_environments_own_mpirun_starts_ranks(here: Path, submit: Axsparse) -> None:
    assert "start() { exec mpirun --host" in submit(*SLURM)[1]
    own = Path(sys.executable).with_name("mpirun")
    own.touch()
    assert f"start() {{ exec {shlex.quote(str(own))} --host" in submit(*SLURM)[1]


def test_a_path_of_any_bytes_is_handed_on(here: Path) -> None:
    (here / os.fsdecode(b"\xff\xc3\xa9.yaml")).touch()
    words = [*SLURM[:-2], os.fsdecode(b"--config=\xff\xc3\xa9.yaml")]

    command._submit(command.parser().parse_args([*words, "--now"]))

    assert b"'--config=\xff\xc3\xa9.yaml'" in next((here / "runs").glob("*.sh")).read_bytes()


# --- the loop of a script ----------------------------------------------------------------

CLUSTER = """\
sbatch() { echo "submitted again"; }
bsub() { cat > "$HERE/again" && sbatch; }
qsub() { [ "$*" = "$HERE/r.sh" ] && sbatch; }
scontrol() { [ "$1 $2" = "show hostnames" ] && printf '%s\\n' $HOSTS; }
srun() { case "$*" in *" -w $GONE true") return 1 ;; *" -w "*" true") ;; *) return 2 ;; esac; }
blaunch() { [ "$1 $2" != "$GONE true" ]; }
pbs_tmrsh() { blaunch "$@"; }
flux() {
  case "$*" in
    "hostlist --expand --delimiter=\\n instance") printf '%s\\n' $HOSTS ;;
    "hostlist --expand --delimiter=\\n avail") printf '%s\\n' $HOSTS | grep -vxF "$GONE" ;;
    "--parent batch $HERE/r.sh") sbatch ;;
    "run "*) mpirun "${@:2}" ;;
    *) return 2 ;;
  esac
}
mpirun() {
  printf '%s\\n' "$PWD" "$@" > "$HERE/arguments"
  read -r code saved < "$HERE/next" || exit 70
  sed -i 1d "$HERE/next"
  [ -z "$saved" ] || mkdir -p "$HERE/r/checkpoints/step-$saved"
  echo "ranks end with $code"
  exit "$code"
}
timeout() { shift 3; "$@"; }
exec() { "$@"; }
sleep() { command sleep 0.01; }
"""
"""Commands of clusters, as their manuals have them: ranks end as the next line of a file says, and
perhaps save a step. sbatch(1) and qsub(1B) take a path, bsub(1) stdin; scontrol(1) show hostnames;
srun(1) -w; blaunch(1) and pbs_tmrsh(8B) a host and a command; flux-hostlist(1), flux-run(1)."""


def job(here: Path, script: str, *ends: str, gone: str = "", save_at: int = 3600) -> str:
    """What a job's script says whose ranks end so; at last the code that it ends with."""
    (here / "next").write_text("".join(f"{end}\n" for end in ends))
    for before, after in (("save_at=", f"save_at={save_at} was="), ("pause=30", "pause=0")):
        assert before in script
        script = script.replace(before, after, 1)
    (here / "job.sh").write_text(script)
    (here / "nodes").write_text("n1\nn2\n")
    environment = {
        **os.environ,
        **{"HOSTS": "n1 n2", "GONE": gone, "HERE": str(here), "SLURM_JOB_NODELIST": "n"},
        **{"LSB_MCPU_HOSTS": "n1 1 n2 1", "PBS_NODEFILE": str(here / "nodes")},
    }
    done = subprocess.run(
        ["bash", "-c", CLUSTER + script, str(here / "job.sh")],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return f"{done.stdout}{done.returncode}"


AGAIN = "axsparse: 2 ranks on 2 of 2 nodes\n"


@pytest.mark.parametrize(
    ("ends", "save_at", "said"),
    [
        (["0"], 3600, "ranks end with 0\n0"),
        *((["1 2", code], 3600, f"ranks end with {code}\n{code}") for code in ("65", "66", "78")),
        (["137 2", "137 4", "0"], 3600, "ranks end with 0\n0"),
        (["75 2"], 3600, "ranks end with 75\n75"),
        (
            ["1"] * 5,
            3600,
            "ranks end with 1\naxsparse: error: failed 5 times without a new checkpoint\n1",
        ),
        ([], 0, "axsparse: error: no new checkpoint in this job, so none follows it\n70"),
    ],
    ids=str,
)
def test_a_job_goes_on_until_it_is_done_or_would_only_repeat_itself(
    ends: list[str], save_at: int, said: str, here: Path, submit: Axsparse
) -> None:
    script = submit(*SLURM, "--run-dir", "r")[1]

    found = job(here, script, *ends, save_at=save_at)

    *before, _ = ends or [""]
    again = "".join(f"{AGAIN}ranks end with {end.split()[0]}\n" for end in before)
    assert found == again + (AGAIN if ends else "") + said


@pytest.mark.parametrize("name", ALL)
def test_a_job_whose_time_is_over_submits_itself_again(
    name: str, here: Path, submit: Axsparse
) -> None:
    script = submit(f"--{name}", *ASKED, "--run-dir", "r")[1]
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


HARD = "data.path=a  b/$HOME/`id`/'\"/*/é/\\n/@ranks@/!x"


def test_values_arrive_at_the_ranks_as_they_were_given(here: Path, submit: Axsparse) -> None:
    (here / "my conf").mkdir()
    (here / "my conf" / "-é $x.yaml").write_text("seed: 5\n")
    (here / "my modules.sh").write_text("echo modules are loaded\npython=/other/python\n")
    config = str(here / "my conf" / "-é $x.yaml")
    options = ["--config", config, "--set", HARD, "--steps", "6", "--run-dir", "my run"]

    script = submit("--slurm", *ASKED, *options, "--setup", "my modules.sh")[1]

    assert job(here, script, "0").startswith("modules are loaded\n")
    folder, *words = (here / "arguments").read_text().splitlines()
    assert folder == str(here)
    assert words[words.index("axsparse.train") - 2] == "/other/python"
    assert words[words.index("axsparse.train") + 1 :] == [
        *(f"--config={config}", "--set=layout.g_inter=auto", f"--set={HARD}"),
        *("--set=train.steps=6", "--set=run_dir=my run"),
        *(f"--run-dir={here}/my run", "--resume=auto"),
    ]


# --- submitting --------------------------------------------------------------------------


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


# --- the command -------------------------------------------------------------------------


def test_the_examples_of_the_help_are_command_lines() -> None:
    text = command.DESCRIPTION.replace("\\\n", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith("axsparse ")]

    assert len(lines) == 3
    for line in lines:
        command.parser().parse_args(shlex.split(line.partition(">")[0])[2:])
