"""Benchmarks in the manner of the OSU micro-benchmarks and nccl-tests: compressed collectives against MPI's own."""
