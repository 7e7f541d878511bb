"""The planner compared with published runs, by tables of their sizes and figures."""
