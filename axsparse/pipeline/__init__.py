"""Pipeline parallelism on one rank: the policy of a stage, and the engine that runs its actions.

A microbatch goes from `engine` to `policy` (what runs next), to `stage` (runs it), to a link.
"""
