"""The parts of `examples/train_lm.py`."""
