"""When masks are drawn and changed during training, on all ranks alike."""
