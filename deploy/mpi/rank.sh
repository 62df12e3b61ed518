#!/bin/bash
# Run a Python script as one rank of Open MPI's mpirun: docs/launch/mpirun.md explains it.
#
#     mpirun -n 2 -x MASTER_ADDR=node1 -x MASTER_PORT=29500 rank.sh train.py --root runs/gpt
#
export RANK=$OMPI_COMM_WORLD_RANK WORLD_SIZE=$OMPI_COMM_WORLD_SIZE
export LOCAL_RANK=$OMPI_COMM_WORLD_LOCAL_RANK LOCAL_WORLD_SIZE=$OMPI_COMM_WORLD_LOCAL_SIZE
exec "${PYTHON:-python}" "$@"
