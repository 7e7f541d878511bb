"""Tensor parallelism: one layer on several ranks.

Each rank holds one shard of the matrices that `plan` names; `modules` multiply by shards, `group`
sums over the ranks, and `lockstep` has all of them run the actions that the first one decides.
"""
