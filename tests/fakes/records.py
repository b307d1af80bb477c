"""What records of the benchmark say of their run, made up."""

RUN = {
    "cpu": "Some",
    "cores": 2,
    "instruction_set": "avx2",
    "commit": "abc1234",
    "date": "2026-01-02T03",
    "mpi": "MPI 1",
    "torch": "2",
}
