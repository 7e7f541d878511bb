"""Pipeline parallelism on one rank: what a stage does next, and doing it.

A microbatch goes from `engine` to `policy` (what runs next), to `stage` (runs it), to a link.
"""
