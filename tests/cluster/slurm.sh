#!/usr/bin/env bash
# A Slurm cluster of two nodes, n1 and n2, on this machine, as root: tests/cluster/slurm.sh start|stop FOLDER
# It needs Debian's slurm-wlm and munge. SLURM_CONF=FOLDER/slurm.conf lets the commands of Slurm find it.
set -euo pipefail
action=$1 folder=$(mkdir -p "$2" && cd "$2" && pwd)
export SLURM_CONF=$folder/slurm.conf

start() {
    mkdir -p /run/munge "$folder/state"
    chown munge:munge /run/munge
    munge -n >"$folder/munge.log" 2>&1 || su munge -s /bin/sh -c "/usr/sbin/munged --force" >>"$folder/munge.log" 2>&1
    cat >"$SLURM_CONF" <<CONF
ClusterName=tests
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=17000
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool-%n
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd-%n.pid
SlurmctldLogFile=$folder/slurmctld.log
SlurmdLogFile=$folder/slurmd-%n.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
MinJobAge=3600
NodeName=n1 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17001 CPUs=1 RealMemory=4000
NodeName=n2 NodeHostname=$(hostname -s) NodeAddr=127.0.0.1 Port=17002 CPUs=1 RealMemory=4000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP
CONF
    slurmctld
    slurmd -N n1
    slurmd -N n2
    for _ in $(seq 60); do
        [[ $(sinfo --noheader --format %D --states idle) == 2 ]] && return
        sleep 0.5
    done
    echo "the nodes did not become idle: see $folder/*.log" >&2
    sinfo >&2
    return 1
}

stop() {
    scancel --user root || true
    for pid in "$folder"/*.pid; do
        [[ -e $pid ]] && kill "$(cat "$pid")" || true
    done
}

"$action"
