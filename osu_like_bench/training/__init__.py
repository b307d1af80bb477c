"""Models, data and processes to train with: what `launch/train_ddp.py` and the ``ddp`` benchmark share. Needs torch."""
