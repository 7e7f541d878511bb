"""The pruning methods: when masks are drawn and changed during training."""
