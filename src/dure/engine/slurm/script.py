"""The batch script, as text: a pure function of a request, so that what is shown is what is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dure.engine.slurm.quoting import file_pattern, sbatch_word, shell_word, variable
from dure.engine.slurm.request import Request

SAVE_AND_QUEUE, SAVE_AND_END = "USR1", "USR2"
"""What the script does when its shell gets these signals."""
MARK_RUN, MARK_RUNS = "dure run=", "dure runs="
"""Begin the comment of a job of ours; then come the run's folder, or what is its folder when the job's id is added."""
FIRST_PORT, PORTS = 20000, 10000
"""A job's port is the first and its number, modulo so many: below those that the kernel gives to anyone."""


def port_of(job_id: int) -> int:
    """The port that belongs to a job."""
    return FIRST_PORT + job_id % PORTS


def script(request: Request) -> str:
    """The text that sbatch is given."""
    step = _STEP.format(
        agent=_block(_agent(request), 2), why=_why(request), srun=_continued(_srun(request))
    ).strip("\n")
    parts = [
        f"#!/bin/bash\n{_heading(request)}",
        "\n".join(_sbatch_lines(request)),
        _PREPARE.format(
            run=_run(request),
            requeues=request.requeues if request.resumable else 0,
            first_port=FIRST_PORT,
            ports=PORTS,
        ),
        *([_BUDGET, _KEY, _SIGNALS] if request.resumable else [_KEY]),
        _LEADER,
        *([f"{step} &{_AWAIT}", _END] if request.resumable else [step]),
    ]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _heading(request: Request) -> str:
    nodes = f"{request.nodes} node{'s' if request.nodes > 1 else ''}"
    if request.min_nodes < request.nodes:
        nodes = f"{request.min_nodes} to {nodes}"
    return (
        f"# {request.name}: {nodes}, {request.ranks} rank{'s' if request.ranks > 1 else ''} on each. "
        "Written by `dure submit`; sbatch takes it as it is."
    )


def _sbatch_lines(request: Request) -> Iterator[str]:
    def line(option: str, value: str) -> str:
        return f"#SBATCH --{option}={sbatch_word(option, value)}"

    fewest, most = request.min_nodes, request.nodes
    yield line("job-name", request.name)
    yield line("nodes", f"{fewest}-{most}" if fewest < most else str(most))
    if fewest < most:
        yield "# A node that fails does not end the job: the others go on without it."
        yield "#SBATCH --no-kill"
        yield "# One task on each node, as srun says below; said here, Slurm would give the fewest nodes only."
    else:
        yield "# One task on each node: the agent, which starts the node's ranks."
        yield "#SBATCH --ntasks-per-node=1"
    yield line("cpus-per-task", str(request.cpus_per_node))
    if request.gpus_per_node:
        yield line("gres", f"gpu:{request.gpus_per_node}")
    for option, value in (
        ("partition", request.partition),
        ("account", request.account),
        ("time", request.time),
    ):
        if value is not None:
            yield line(option, value)
    if request.resumable:
        yield "# So many seconds before the time limit, this script, and it alone (B:), is told: see below."
        yield line("signal", f"B:{SAVE_AND_QUEUE}@{request.signal_seconds}")
        yield "#SBATCH --requeue"
        yield "#SBATCH --open-mode=append"
    else:
        yield "# This run saves no checkpoints: it could only start anew."
        yield "#SBATCH --no-requeue"
    yield line("chdir", str(request.work))
    yield "# The folder must be there already: `dure submit` makes it; Slurm would not, and would lose the log."
    yield line("output", file_pattern("the log's folder", str(request.logs)) + f"/{request.name}-%j.log")
    yield "# By this, `dure status` and `dure cancel` find the run of a job."
    yield line(
        "comment",
        MARK_RUN + str(request.run) if request.run else f"{MARK_RUNS}{request.runs}/{request.name}-",
    )
    for option in request.options:
        name, equals, value = option.partition("=")
        yield f"#SBATCH {sbatch_word('slurm.options', name)}" + (
            f"={sbatch_word('slurm.options', value)}" if equals else ""
        )


def _run(request: Request) -> str:
    if request.run is not None:
        return shell_word(str(request.run))
    return shell_word(f"{request.runs}/{request.name}-{variable('job')}")


def _agent(request: Request) -> list[list[str]]:
    """The command of one agent, in lines of words that belong together."""
    fewest = f"{request.min_nodes}:" if request.min_nodes < request.nodes else ""
    return [
        list(request.train),
        ["--nodes", fewest + variable("nodes"), "--leader", f"{variable('leader')}:{variable('port')}"],
        ["--run-dir", variable("run"), "--team-key", f"{variable('run')}/team.key"],
    ]


def _srun(request: Request) -> list[list[str]]:
    elastic = request.min_nodes < request.nodes
    return [
        ["srun", f"--nodes={variable('nodes')}", f"--ntasks={variable('nodes')}", "--ntasks-per-node=1"],
        # Since Slurm 22.05, srun does not take this from the job any more.
        [f"--cpus-per-task={request.cpus_per_node}", "--label"],
        ["--kill-on-bad-exit=0", f"--wait={0 if elastic else request.wait_seconds}"]
        + (["--no-kill"] if elastic else []),
        *([[word] for word in request.srun_options]),
    ]


def _why(request: Request) -> str:
    if request.min_nodes < request.nodes:
        return _WHY_ELASTIC
    return _WHY_TOGETHER.format(seconds=request.wait_seconds)


def _block(lines: Sequence[Sequence[str]], indent: int) -> str:
    return "\n".join(" " * indent + " ".join(map(shell_word, words)) for words in lines)


def _continued(lines: Sequence[Sequence[str]]) -> str:
    return " \\\n".join(_block([words], 0 if at == 0 else 2) for at, words in enumerate(lines))


_PREPARE = """
# shellcheck disable=SC2016 # a $ between single quotes is meant for the task's shell, or is part of a name
set -euo pipefail

# Everything is quoted here, once; below there are only "$names", so that nothing in a name is read as shell.
job=$SLURM_JOB_ID
# The same folder in every attempt, so that a job that is queued again goes on with its run.
run={run}
requeues={requeues}
attempt=${{SLURM_RESTART_COUNT:-0}}
nodes=$SLURM_JOB_NUM_NODES
# A port that belongs to the job, below those that the kernel gives to anyone.
port=$(({first_port} + job % {ports}))

say() {{ printf 'dure: %s\\n' "$*" >&2; }}
"""

_BUDGET = """
if ((attempt > requeues)); then
  # Slurm itself queues a job again that lost a node, without asking.
  say "queued again $attempt times, and slurm.requeues is $requeues: stopped. All that was saved is in $run"
  exit 75
fi
rm -f -- "$run/stop" # left by an attempt that was killed before it could save
"""

_SIGNALS = f"""
may_queue=yes ended=no
queue_again() {{
  if [[ $may_queue == no ]] || ((attempt >= requeues)); then
    say "$1: stopped, and resumable (queued again $attempt of $requeues times); dure submit with --run-dir $run goes on"
    return
  fi
  say "$1: queued again, $((attempt + 1)) of at most $requeues times"
  scontrol requeue "$job" || say "and Slurm refused; dure submit with --run-dir $run goes on"
}}

# Signals come to this shell alone. One that went to the step would reach each of its processes, the containers' and
# the data loaders' too, and kill most of them; so the ranks are asked by a file, which they look for at every step,
# and which is seen inside a container as well.
ask_to_save() {{
  signalled=yes
  say "$1: the run saves after this step and ends"
  touch -- "$run/stop" || say "but $run/stop cannot be made: it goes on from its newest checkpoint later"
}}
trap 'ask_to_save "the time is nearly over, or the nodes are wanted"' {SAVE_AND_QUEUE}
trap 'may_queue=no; ask_to_save "dure cancel"' {SAVE_AND_END}

# scancel, scontrol requeue, preemption: Slurm ends the step and decides what comes next. Only after its time limit,
# when the run could not save in time, it would leave the job at that. This shell has KillWait seconds left.
end() {{
  signalled=yes
  if [[ $ended == no ]]; then
    ended=yes
    if [[ " $(scontrol show job --oneliner "$job") " == *" Reason=TimeLimit "* ]]; then
      queue_again "the time was over before the run had saved"
    fi
  fi
}}
trap end TERM
"""

_LEADER = """
# The leader is the first node: this script runs there, and so will task 0. Its address is found here, because there is
# no scontrol in a container; and as Slurm has it, because a node's own /etc/hosts may say 127.0.1.1.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
leader=${hosts%%$'\\n'*}
if [[ " $(scontrol show node --oneliner "$leader") " =~ \\ NodeAddr=([^ ]+)\\  ]]; then
  leader=${BASH_REMATCH[1]}
fi
if [[ ! $leader =~ ^[0-9]+(\\.[0-9]+){3}$ ]]; then
  if ! addresses=$(getent ahostsv4 "$leader"); then
    say "$leader, the first node, has no IPv4 address here; correct its name, or NodeAddr in slurm.conf"
    exit 4
  fi
  if [[ $addresses == 127.* ]] && ((nodes > 1)); then
    say "$leader, the first node, calls itself ${addresses%% *}, where no other node finds it; correct its /etc/hosts"
    exit 4
  fi
  leader=${addresses%% *}
fi
say "job $job on ${hosts//$'\\n'/ }, attempt $((attempt + 1)) of at most $((requeues + 1)); leader $leader:$port; $run"
"""

_KEY = """
# The agents of this attempt prove to each other that they belong to it, by a secret that only this user can read. It
# goes to the other nodes over the storage: arguments and variables of a job can be seen by others.
forget_key() {
  rm -f -- "$run/team.key"
}
trap forget_key EXIT
forget_key
mkdir -p -- "$run"
(umask 077 && od -An -N32 -tx1 /dev/urandom >"$run/team.key")
"""

_WHY_TOGETHER = """\
# --kill-on-bad-exit=0: the first agent that ends, with 75, must not have the others killed while they save.
# --wait: when one has ended and another has not {seconds} s later, its node is lost; Slurm would wait for minutes."""

_WHY_ELASTIC = """\
# --kill-on-bad-exit=0, --wait=0, --no-kill: an agent that ends, and a node that fails, leave the others running;
# they are noticed, and let go, by the agents themselves."""

_STEP = """
# The command of a node's agent; which node it is on, only the task itself knows.
agent=(
{agent}
)
{why}
{srun} \\
  sh -c 'exec "$@" --node-rank "$SLURM_NODEID"' agent "${{agent[@]}}"
"""

_AWAIT = """
step=$!
signalled=yes
while [[ $signalled == yes ]]; do # a signal ends `wait` before the step has ended
  signalled=no code=0
  wait "$step" || code=$?
done
"""

_END = """
if [[ $ended == yes ]]; then
  say "ended by Slurm; all that was saved is in $run"
  exit 143
fi
# srun gives the highest code of all agents: 75 when they saved, or lost a node or the leader; 137 when one was killed,
# by a machine without memory or by --wait. Anything else would happen again.
if ((code == 75 || code == 137)); then
  queue_again "ended with $code"
  exit 75
elif ((code != 0)); then
  exit "$code"
fi
"""
