#!/usr/bin/env bash
# Train on two machines. Run this on both, with the name under which one of them can be reached by the other.
#
#     bash two-machines.sh node0
#
# Port 29400 of that machine must be open to the other, and the ports that gloo or NCCL choose must be open on both.
set -euo pipefail

# The network interface to the other machine, if a machine has several:
# export GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=eth0

exec lockstep run -n 2 --nnodes 2 --rdzv "$1:29400" --max-restarts 3 train.py
