#!/bin/bash
#PBS -N compcoll
#PBS -l select=2:ncpus=4:mpiprocs=4
#PBS -l walltime=00:15:00
# The benchmark on two nodes: qsub launch/pbs.sh. See docs/launching/pbs.md.
set -euo pipefail
cd "$PBS_O_WORKDIR"
source .venv-system/bin/activate # make MPI=system install, with the site's MPI module loaded
ranks=$(wc -l <"$PBS_NODEFILE")
if mpirun --version 2>&1 | grep -q "Open MPI"; then
  hosts=(--hostfile "$PBS_NODEFILE" --bind-to core)
else
  hosts=(-f "$PBS_NODEFILE" -bind-to core)
fi
mpirun -n "$ranks" "${hosts[@]}" python -m osu_like_bench allreduce -m 16M --codec zfp:rate=8 --compare native,ring
