#!/usr/bin/env bash
# Two hosts with a cable between them; run by `unshare -rn`. Each runs its program, with RANK set, and writes
# FOLDER/out-RANK, err-RANK and code-RANK. The cable is cut when FOLDER/cut appears.
# hosts.sh FOLDER PROGRAM [ARGUMENT ...]
set -eu
folder=$1
shift
unshare -n sleep 1000 &
other=$!
trap 'kill $other' EXIT
while [[ $(readlink /proc/$other/ns/net) == $(readlink /proc/self/ns/net) ]]; do sleep 0.02; done
ip link add name here type veth peer name there
ip link set there netns $other
ip addr add 10.91.0.1/24 dev here
ip link set lo up
ip link set here up
nsenter -t $other -n ip addr add 10.91.0.2/24 dev there
nsenter -t $other -n ip link set lo up
nsenter -t $other -n ip link set there up
export MASTER_ADDR=10.91.0.1 MASTER_PORT=29533 WORLD_SIZE=2 LOCAL_RANK=0 LOCAL_WORLD_SIZE=1
rank() { # RANK INTERFACE COMMAND...
  RANK=$1 GLOO_SOCKET_IFNAME=$2 "${@:3}" >"$folder/out-$1" 2>"$folder/err-$1" && echo 0 >"$folder/code-$1" ||
    echo $? >"$folder/code-$1"
}
rank 0 here "$@" &
first=$!
rank 1 there nsenter -t $other -n "$@" &
second=$!
while [[ ! -e $folder/cut ]] && kill -0 $first 2>/dev/null; do sleep 0.05; done
ip link set here down
wait $first $second
