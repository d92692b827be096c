#!/usr/bin/env bash
# A Slurm cluster of two nodes, n1 and n2, on this machine, as root: tests/cluster/slurm.sh start|stop FOLDER
# It needs Debian's slurm-wlm and munge, and it is alone: its ports are free ones, its munge daemon is its own.
# SLURM_CONF=FOLDER/slurm.conf lets the commands of Slurm find it.
set -euo pipefail
action=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf

free_ports() {
    python3 -c '
import socket
sockets = [socket.socket() for _ in range(3)]
for each in sockets:
    each.bind(("127.0.0.1", 0))
print(*(each.getsockname()[1] for each in sockets))'
}

start() {
    read -r controller n1 n2 < <(free_ports)
    mkdir -p "$folder/state"
    (umask 077 && head -c 1024 /dev/urandom >"$folder/munge.key")
    munged --force --key-file="$folder/munge.key" --socket="$folder/munge.socket" --seed-file="$folder/munge.seed" \
        --pid-file="$folder/munged.pid" --log-file="$folder/munged.log" 2>>"$folder/munged.log"
    cat >"$SLURM_CONF" <<CONF
ClusterName=tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$controller
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
SlurmdTimeout=20
MessageTimeout=60
KillWait=2
CompleteWait=0
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$n1 CPUs=1
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=$n2 CPUs=1
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
    slurmctld
    slurmd -N n1
    slurmd -N n2
    for _ in $(seq 240); do
        [[ $(sinfo --noheader --format %D --states idle) == 2 ]] && return
        sleep 0.5
    done
    echo "the nodes did not become idle:" >&2
    sinfo >&2 || true
    tail "$folder"/*.log >&2
    return 1
}

# All processes of the cluster: the daemons, which run in its folder, its munge daemon, and what its jobs started.
processes() {
    {
        find /proc -maxdepth 2 -path '/proc/[0-9]*/cwd' -lname "$folder*"
        grep -lzFx -- "--key-file=$folder/munge.key" /proc/[0-9]*/cmdline
        grep -lzFx "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ | xargs -r grep -lz "^SLURM_JOB_ID="
    } 2>/dev/null | cut -d/ -f3 | sort -u || true
}

# A daemon that is asked to end waits for the steps of jobs, which wait for the controller: so they are not asked.
stop() {
    local left
    scancel --user root 2>/dev/null || true
    for _ in $(seq 20); do
        left=$(squeue --noheader 2>/dev/null) || true
        [[ -n $left ]] || break
        sleep 0.5
    done
    for _ in $(seq 20); do
        left=$(processes)
        [[ -n $left ]] || return 0
        # shellcheck disable=SC2086
        kill -KILL $left 2>/dev/null || true
        sleep 0.5
    done
    echo "still running: $left" >&2
    return 1
}

"$action"
