"""One thread for every test: the models are tiny, and threads would only wait for each other."""

import torch

torch.set_num_threads(1)
