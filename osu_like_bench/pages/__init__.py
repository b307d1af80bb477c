"""The pages of docs/measurements: what is measured for each, and how its tables are made. For clones, not installed.

A page is a document with marks, ``<!-- table of something -->`` … ``<!-- end -->``, and a record beside it,
``PAGE.json``: the commands that are measured, and their figures. `python -m osu_like_bench.pages` measures and writes.
"""
