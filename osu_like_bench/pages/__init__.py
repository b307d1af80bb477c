"""Measure and write the pages of docs/measurements. This package works in a clone of the repository only.

A page is a document with marks, ``<!-- table of something -->`` … ``<!-- end -->``, and a record beside it,
``PAGE.json``, which holds commands and their measured figures. `python -m osu_like_bench.pages` runs the commands and
writes tables between the marks.
"""
