#!/bin/bash
# cats: 2 nodes, 4 ranks on each. Written by `dure submit`; sbatch takes it as it is.

#SBATCH --job-name=cats
#SBATCH --nodes=2
# One task on each node: the agent, which starts the node's ranks.
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=2:00:00
# This run saves no checkpoints: it could only start anew.
#SBATCH --no-requeue
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
requeues=0
attempt=${SLURM_RESTART_COUNT:-0}
nodes=$SLURM_JOB_NUM_NODES
# A port that belongs to the job, below those that the kernel gives to anyone.
port=$((20000 + job % 10000))

say() { printf 'dure: %s\n' "$*" >&2; }

# The agents of this attempt prove to each other that they belong to it, by a secret that only this user can read. It
# goes to the other nodes over the storage: arguments and variables of a job can be seen by others.
forget_key() {
  rm -f -- "$run/team.key"
}
trap forget_key EXIT
forget_key
mkdir -p -- "$run"
(umask 077 && od -An -N32 -tx1 /dev/urandom >"$run/team.key")

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
  sh -c 'exec "$@" --node-rank "$SLURM_NODEID"' agent "${agent[@]}"
