#!/usr/bin/env bash
# Runs a script on two nodes that are network namespaces of this machine, with a private process tree and private mounts:
# whatever the script starts ends with it. Needs root and util-linux, iproute2.
#   bash tests/cluster/two_nodes.sh SCRIPT [argument ...]
# SCRIPT runs on node1 (10.77.0.1) and finds in its environment
#   NODES      a folder with the command `on NODE COMMAND [argument ...]`, which is on the PATH
#   WORK       a folder that is removed at the end, also for temporary files (TMPDIR)
# Exit status: that of SCRIPT; 2 if this machine forbids namespaces.
set -euo pipefail

HERE=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)

if [[ ${1:-} != --inside ]]; then
    [[ $# -gt 0 && -f $1 ]] || { echo "two_nodes.sh: no script given" >&2; exit 2; }
    [[ $(id -u) == 0 ]] || { echo "two_nodes.sh: needs root, to make network namespaces" >&2; exit 2; }
    for program in unshare nsenter ip; do
        type -P "$program" >/dev/null || { echo "two_nodes.sh: needs $program (util-linux, iproute2)" >&2; exit 2; }
    done
    unshare --mount --pid --net --uts --fork true 2>/dev/null || {
        echo "two_nodes.sh: this machine forbids namespaces" >&2
        exit 2
    }
    WORK=$(mktemp -d)
    mkdir "$WORK/tmp"
    export WORK TMPDIR="$WORK/tmp" # what a killed process leaves is removed, too
    trap 'rm -rf "$WORK"' EXIT
    status=0
    # The first process inside is the parent of all others: the kernel ends them with it.
    unshare --mount --pid --net --uts --fork --kill-child --mount-proc bash "$HERE/two_nodes.sh" --inside "$@" || status=$?
    exit "$status"
fi
shift

hostname node1
ip link set lo up
# A process that holds the second node's namespaces open.
unshare --net --uts sleep infinity &
holder=$!
until [[ $(readlink "/proc/$holder/ns/net") != $(readlink /proc/self/ns/net) ]]; do sleep 0.05; done
ip link add eth1 type veth peer name eth1 netns "$holder"
ip address add 10.77.0.1/24 dev eth1
ip link set eth1 up
inside=(nsenter "--net=/proc/$holder/ns/net" "--uts=/proc/$holder/ns/uts")
"${inside[@]}" hostname node2
"${inside[@]}" ip link set lo up
"${inside[@]}" ip address add 10.77.0.2/24 dev eth1
"${inside[@]}" ip link set eth1 up

printf '%s\n' '127.0.0.1 localhost' '10.77.0.1 node1' '10.77.0.2 node2' >"$WORK/hosts"
mount --bind "$WORK/hosts" /etc/hosts
NODES=$WORK/nodes
mkdir "$NODES"
cat >"$NODES/on" <<SCRIPT
#!/bin/bash
# on NODE COMMAND [argument ...]
node=\$1
shift
[[ \$node == node1 ]] && exec "\$@"
exec ${inside[@]} "\$@"
SCRIPT
chmod +x "$NODES/on"
export NODES PATH="$NODES:$PATH"
bash "$@"
