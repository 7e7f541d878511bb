"""Jobs for the schedulers of clusters: what is asked for, and the script that asks."""
