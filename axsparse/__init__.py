"""axsparse: train large pruned networks over pipeline stages and replicas."""

__version__ = "0.1.0"
