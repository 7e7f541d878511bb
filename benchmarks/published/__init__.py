"""The planner held against published runs, by tables of their sizes and figures."""
