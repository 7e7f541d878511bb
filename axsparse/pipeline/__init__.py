"""Message-driven pipeline parallelism: policy, stage, engine and links."""
