#!/bin/bash
# cats: 2 nodes, 4 ranks on each. Written by `dure submit`; sbatch takes it as it is.

#SBATCH --job-name=cats
#SBATCH --nodes=2
# One task on each node: the agent, which starts the node's ranks.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=2:00:00
# So many seconds before the time limit, this script, and it alone (B:), is told: see below.
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --chdir=/shared
# The folder must be there already: `dure submit` makes it; Slurm would not, and would lose the log.
#SBATCH --output=/shared/checkpoints/slurm/cats-%j.log
# By this, `dure status` and `dure cancel` find the run of a job.
#SBATCH --comment="dure runs=/shared/checkpoints/cats-"

# shellcheck disable=SC2016 # a $ between single quotes is meant for the task's shell, or is part of a name
set -euo pipefail

# Everything is quoted here, once; below there are only "$names", so that nothing in a name is read as shell.
job=$SLURM_JOB_ID
# The same folder in every attempt, so that a job that is queued again goes on with its run.
run=/shared/checkpoints/cats-"$job"
requeues=10
attempt=${SLURM_RESTART_COUNT:-0}
nodes=$SLURM_JOB_NUM_NODES
# A port that belongs to the job, below those that the kernel gives to anyone.
port=$((20000 + job % 10000))

say() { printf 'dure: %s\n' "$*" >&2; }

if ((attempt > requeues)); then
  # Slurm itself queues a job again that lost a node, without asking.
  say "queued again $attempt times, and slurm.requeues is $requeues: stopped. All that was saved is in $run"
  exit 75
fi
rm -f -- "$run/stop" # left by an attempt that was killed before it could save

# The agents of this attempt prove to each other that they belong to it, by a secret that only this user can read. It
# goes to the other nodes over the storage: arguments and variables of a job can be seen by others.
forget_key() {
  rm -f -- "$run/team.key"
}
trap forget_key EXIT
forget_key
mkdir -p -- "$run"
(umask 077 && od -An -N32 -tx1 /dev/urandom >"$run/team.key")

may_queue=yes ended=no
queue_again() {
  if [[ $may_queue == no ]] || ((attempt >= requeues)); then
    say "$1: stopped, and resumable (queued again $attempt of $requeues times); dure submit with --run-dir $run goes on"
    return
  fi
  say "$1: queued again, $((attempt + 1)) of at most $requeues times"
  scontrol requeue "$job" || say "and Slurm refused; dure submit with --run-dir $run goes on"
}

# Signals come to this shell alone. One that went to the step would reach each of its processes, the containers' and
# the data loaders' too, and kill most of them; so the ranks are asked by a file, which they look for at every step,
# and which is seen inside a container as well.
ask_to_save() {
  signalled=yes
  say "$1: the run saves after this step and ends"
  touch -- "$run/stop" || say "but $run/stop cannot be made: it goes on from its newest checkpoint later"
}
trap 'ask_to_save "the time is nearly over, or the nodes are wanted"' USR1
trap 'may_queue=no; ask_to_save "dure cancel"' USR2

# scancel, scontrol requeue, preemption: Slurm ends the step and decides what comes next. Only after its time limit,
# when the run could not save in time, it would leave the job at that. This shell has KillWait seconds left.
end() {
  signalled=yes
  if [[ $ended == no ]]; then
    ended=yes
    if [[ " $(scontrol show job --oneliner "$job") " == *" Reason=TimeLimit "* ]]; then
      queue_again "the time was over before the run had saved"
    fi
  fi
}
trap end TERM

# The leader is the first node: this script runs there, and so will task 0. Its address is found here, because there is
# no scontrol in a container; and as Slurm has it, because a node's own /etc/hosts may say 127.0.1.1.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
leader=${hosts%%$'\n'*}
if [[ " $(scontrol show node --oneliner "$leader") " =~ \ NodeAddr=([^ ]+)\  ]]; then
  leader=${BASH_REMATCH[1]}
fi
if [[ ! $leader =~ ^[0-9]+(\.[0-9]+){3}$ ]]; then
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
say "job $job on ${hosts//$'\n'/ }, attempt $((attempt + 1)) of at most $((requeues + 1)); leader $leader:$port; $run"

# The command of a node's agent; which node it is on, only the task itself knows.
agent=(
  /opt/dure/bin/python -m dure train /shared/cats.toml
  --nodes "$nodes" --leader "$leader":"$port"
  --run-dir "$run" --team-key "$run"/team.key
)
# --kill-on-bad-exit=0: the first agent that ends, with 75, must not have the others killed while they save.
# --wait: when one has ended and another has not 120 s later, its node is lost; Slurm would wait for minutes.
srun --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 \
  --cpus-per-task=4 --label \
  --kill-on-bad-exit=0 --wait=120 \
  --container-image=/shared/pytorch_squash.sqsh \
  --container-mounts=/shared:/shared:ro,/shared/checkpoints/cats-"$job":/shared/checkpoints/cats-"$job":rw \
  --container-readonly \
  --no-container-mount-home \
  --no-container-remap-root \
  --no-container-entrypoint \
  --container-workdir=/shared \
  --container-env=DURE_IMAGE \
  --export=DURE_IMAGE=0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f0f \
  sh -c 'exec "$@" --node-rank "$SLURM_NODEID"' agent "${agent[@]}" &
step=$!
signalled=yes
while [[ $signalled == yes ]]; do # a signal ends `wait` before the step has ended
  signalled=no code=0
  wait "$step" || code=$?
done

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
