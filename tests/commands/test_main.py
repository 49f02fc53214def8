"""The command `research-dp`: its overview, its commands' help, hints for what there is not."""

import re
import shlex
import subprocess
import sys

import pytest

import research_dp
from research_dp.commands import cli, configured, entries
from research_dp.commands import main as command_line
from tests.support import programs
from tests.support.repository import ROOT

COMMANDS = entries.COMMANDS


@pytest.fixture
def run(capsys, monkeypatch):
    """Runs `research-dp WORDS`; returns the exit status and what it printed."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["/bin/research-dp"])

    def run(*words):
        try:
            status = command_line.main(list(words))
        except SystemExit as ended:
            status = ended.code
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


def test_without_words_each_command_has_a_line_and_an_example(run):
    status, out, _ = run()
    assert status == 0 and max(map(len, out.splitlines())) <= 80
    for name, entry in COMMANDS.items():
        assert re.search(rf"^{name} +{entry.summary[:40]}", out, re.MULTILINE)
        assert f"\n            research-dp {name}" in out
    assert run("--help") == run("help") == (status, out, "")


def test_the_version_is_the_packages_and_that_of_the_libraries(run):
    status, out, _ = run("--version")
    assert status == 0 and out.startswith(f"research-dp {research_dp.__version__} (jax ")
    assert re.fullmatch(r"\d+\.\d+\.\d+", research_dp.__version__)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tain"], "there is no command 'tain'. Did you mean train?"),
        (["evalute"], "Did you mean evaluate?"),
        (["frobnicate"], "There are train, plan, "),
        (["--gin_file=f"], "give a command first: research-dp train --gin_file=f"),
    ],
)
def test_an_unknown_command_is_refused_with_the_nearest(run, words, said):
    status, out, err = run(*words)
    assert (status, out) == (2, "") and said in err and len(err.splitlines()) == 1


def test_help_of_a_command_is_its_own(run):
    assert run("help", "plan") == run("plan", "--help")
    assert "there is no command 'tain'" in run("help", "tain")[2]


def test_list_is_that_of_train(run):
    assert run("list", "strategies") == run("train", "--list", "strategies")
    assert run("list", "mlp")[1].startswith("mlp(\n")


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"list"}))
def test_help_fits_and_ends_with_examples(run, name):
    status, out, _ = run(name, "--help")
    assert status == 0
    assert all(len(line) <= 80 for line in out.splitlines()), out
    assert out.startswith(f"usage: research-dp {name} [-h]")
    if name != "checkpoints":
        assert f"\nexamples:\n  research-dp {name} " in out
    assert "README" not in out and "python -m" not in out
    assert re.search(r"heartbeat_seconds.*\(default: 100\)", out, re.DOTALL) or name != "train"


@pytest.mark.parametrize("words", [("--help",), ("train", "--help"), ("list", "models")])
def test_a_very_narrow_terminal_gets_the_text_too(run, monkeypatch, words):
    monkeypatch.setenv("COLUMNS", "8")
    status, out, _ = run(*words)
    assert status == 0 and out


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_examples_are_command_lines_that_are_accepted(name, capsys):
    for example in COMMANDS[name].examples if name != "launch" else ():
        words = shlex.split(example)
        given = cli.parse(name, ["--list", *words] if name == "list" else words)
        with configured.session(given.get("gin_files", ()), given.get("bindings", ())) as run:
            if run.gin_files:
                run.load(complete=False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--cpu-devices=8"], "no flag --cpu-devices. Did you mean --cpu_devices=8?"),
        (["--work_dir", "d"], "no flag --work_dir. Did you mean --workdir=d?"),
        (["--gin_files=f.gin"], "Did you mean --gin_file=f.gin?"),
        (["--dry-run"], "Did you mean --dry_run?"),
        (["runs/digits.gin"], "Did you mean --gin_file=runs/digits.gin?"),
        (["--num_steps=20"], "no flag --num_steps. Did you mean --gin.train.num_steps=20?"),
        (["--strategy=ddp"], "Did you mean --gin_file=strategies/ddp.gin?"),
        (["--steps", "500"], "no flag --steps. Did you mean --gin.train.num_steps=500?"),
        (["--batch-size"], "no flag --batch-size. Did you mean --gin.train.batch_size=VALUE?"),
        (["--lr=0.1"], "no flag --lr. The optimizer has it: --gin.warmup_cosine.peak_value=0.1"),
        (["--epochs=3"], "an epoch has examples / batch size: --gin.train.num_steps=N. ("),
        (["--resume"], "A run continues by itself when it gets the same --workdir. ("),
        (["--strategies=ddp,fsdp"], "To train several: `compare --strategies=ddp,fsdp`. ("),
        (["--frobnicate"], "there is no flag --frobnicate. (--help shows all flags)"),
        (["--aaa", "--bbb"], "there is no flag --aaa. There is no flag --bbb. ("),
    ],
)
def test_a_flag_that_there_is_not_is_refused_with_the_nearest(run, words, said):
    status, _, err = run("train", "--gin_file=runs/digits.gin", *words)
    assert status == 2 and said in err


def test_a_hint_on_a_flag_needs_no_jax():
    code = (
        "import sys; sys.modules['jax'] = None\n"
        "from research_dp.commands.main import main\n"
        "main(['train', '--gin_file=runs/digits.gin', '--steps', '500'])"
    )
    done = programs.run(code)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no flag --steps. Did you mean --gin.train.num_s")


def test_the_module_is_the_same_command():
    words = [sys.executable, "-m", "research_dp"]
    done = subprocess.run([*words, "plan", "--help"], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout.startswith("usage: research-dp plan [-h]")


@pytest.mark.parametrize("name", ["train", "launch"])
def test_an_interrupt_while_modules_are_imported_is_one_line(name):
    """An extension that is being imported raises ImportError in place of KeyboardInterrupt."""
    code = f"""
import os, signal
from research_dp.commands import main

def imported(name):
    os.kill(os.getpid(), signal.SIGINT)
    raise ImportError("of an extension")

signal.signal(signal.SIGINT, signal.default_int_handler)
main.importlib.import_module = imported
main.main(["{name}", "--gin_file=f", "--workdir=w"])
"""
    done = programs.run(code)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "Interrupted: nothing more was done\n"


def test_a_module_that_a_function_replaced_can_be_found():
    code = (
        "import importlib.util, research_dp.plan, research_dp\n"
        "assert callable(research_dp.plan) and research_dp.plan.main\n"
        "assert importlib.util.find_spec('research_dp.plan').name == 'research_dp.plan'"
    )
    programs.output(code)


def test_flags_of_a_launched_run_come_after_dashes(run):
    status, _, err = run("launch", "-n", "2", "--gin_file=runs/digits.gin", "--workdir=d")
    assert status == 2 and len(err.splitlines()) == 1
    assert "come after --. E.g. research-dp launch -n 2 -- --gin_file=" in err


def test_what_names_the_commands_imports_no_jax():
    code = (
        "import sys\nfrom research_dp.commands import main\nmain.main(['--help'])\n"
        "main.main(['--version'])\nimport research_dp.train, research_dp.launch\n"
        "print([m for m in ('jax', 'flax', 'gin') if m in sys.modules])"
    )
    assert programs.output(code).splitlines()[-1] == "[]"


def test_the_console_script_imports_modules_in_the_working_directory(tmp_path):
    script = tmp_path / "bin" / "research-dp"
    script.parent.mkdir()
    script.write_text("import sys\nfrom research_dp.commands.main import main\nsys.exit(main())\n")
    (tmp_path / "mine.py").write_text("import gin\n\n@gin.register\ndef my_model():\n    pass\n")
    words = [sys.executable, script, "train", "--gin_file=runs/digits.gin", "--dry_run"]

    def error(module):
        words[5:] = [f"--import={module}", "--gin.train.model=@my_model()"]
        options = {"cwd": tmp_path, "capture_output": True, "text": True, "check": False}
        done = subprocess.run(words, env=programs.environment(), **options)
        assert done.returncode == 2
        return done.stderr

    assert "None" in error("mine")  # it was imported and called
    (line,) = error("mien").splitlines()  # none about @my_model, which follows from it
    assert "No module named 'mien'. It must be in the working directory" in line


def test_a_working_directory_that_was_removed_is_no_error(tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = 'rmdir "$PWD"; exec "$0" -m research_dp train --gin_file=runs/digits.gin --dry_run'
    words = ["sh", "-c", line, sys.executable]
    options = {"cwd": gone, "capture_output": True, "text": True, "check": False}
    done = subprocess.run(words, env=programs.environment(), **options)
    assert done.returncode == 0, done.stderr
    assert "train.num_steps = " in done.stdout


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("tr", "train"),
        ("plan --gin_file = runs/digits.gin --strat", "--strategies"),
        ("train --gin_file = strategies/fsdp_", "strategies/fsdp_keep.gin"),
        ("train --gin_file examples/own_model/l", "examples/own_model/linen.gin"),
        ("launch -n 2 -- --gin_file = strategies/hsdp_", "strategies/hsdp_zero1.gin"),
        ("sweep --vary.", ""),
        ("--vers", "--version"),
    ],
)
def test_bash_completes_commands_flags_and_gin_files(run, words, completed):
    """Readline hands `--gin_file=F` over as three words."""
    _, script, _ = run("--completion", "bash")
    ask = f"COMP_WORDS=(research-dp {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))"
    script += f"{ask}\n_research_dp\necho ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == (completed, "")


def test_completed_words_may_be_files_whose_names_bash_then_quotes(run):
    _, script, _ = run("--completion", "bash")
    asked = f"{script}\ncomplete -p research-dp"
    done = subprocess.run(["bash"], input=asked, capture_output=True, text=True, timeout=60)
    assert "-o default" in done.stdout and "-o filenames" in done.stdout


def test_completion_is_for_bash(run):
    status, _, err = run("--completion", "fish")
    assert status == 2 and "source <(research-dp --completion bash)" in err
