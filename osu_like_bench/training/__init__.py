"""Models and processes for training, shared by `launch/train_ddp.py` and the ``ddp`` benchmark. Needs torch."""
