"""One thread for every test, because the models are tiny and threads would only wait for each other; and no deadlines."""

import torch
from hypothesis import settings

torch.set_num_threads(1)

# The parent is whatever hypothesis chose: where CI is set, it draws the same examples every time.
settings.register_profile("draftree", parent=settings.default, deadline=None)
settings.load_profile("draftree")
