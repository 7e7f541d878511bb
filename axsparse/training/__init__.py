"""One training job: how its parts are built and joined, its loop, and its outputs."""
