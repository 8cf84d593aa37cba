#!/usr/bin/env bash
# Runs a script in a Slurm cluster of two nodes with two cores each; called by two_nodes.sh on node1.
#   bash tests/cluster/two_nodes.sh tests/cluster/slurm_cluster.sh SCRIPT [argument ...]
# Partitions: low (default), whose jobs are put back into the queue, 60 s after a SIGTERM, when a job of `high` needs
# their nodes; and high.
set -euo pipefail

mkdir -p "$WORK"/slurm/{state,log,run}
cd "$WORK/slurm"
mount -t tmpfs tmpfs /run  # sockets and pid files of the daemons
(umask 077 && head -c 1024 /dev/urandom >munge.key)
chmod 755 "$WORK"
munged --key-file="$PWD/munge.key" --socket="$PWD/run/munge.socket" --pid-file="$PWD/run/munged.pid" \
    --log-file="$PWD/log/munged.log" --seed-file="$PWD/run/munge.seed" --force 2>"$PWD/log/munged.start"

export SLURM_CONF=$PWD/slurm.conf
cat >slurm.conf <<CONF
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket=$PWD/run/munge.socket,cred_expire=5
StateSaveLocation=$PWD/state
SlurmdSpoolDir=$PWD/spool.%n
SlurmctldPidFile=$PWD/run/slurmctld.pid
SlurmdPidFile=$PWD/run/slurmd.%n.pid
SlurmctldLogFile=$PWD/log/slurmctld.log
SlurmdLogFile=$PWD/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
MpiDefault=none
MinJobAge=36000
SlurmdTimeout=3600
MessageTimeout=100
BatchStartTimeout=300
NodeName=node1 CPUs=2 RealMemory=1000
NodeName=node2 CPUs=2 RealMemory=1000
PartitionName=low Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=120
PartitionName=high Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
CONF
slurmctld -c
slurmd -N node1
on node2 slurmd -N node2
for ((attempt = 0; ; attempt++)); do
    [[ $(sinfo --noheader --states=idle --format=%D --partition=low) != 2 ]] || break
    if [[ $attempt == 600 ]]; then
        echo "slurm_cluster.sh: Slurm does not come up on this machine:" >&2
        sinfo --Node --long >&2
        tail -n 20 log/*.log >&2
        exit 2
    fi
    sleep 0.2
done
cd - >/dev/null
bash "$@"
