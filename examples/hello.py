"""The smallest complete program:

    pccl launch -n 4 examples/hello.py

Peers connect to a master and sum an array; all of them get the same result.
"""

import os

import numpy as np

from pccl import Communicator

with Communicator() as communicator:
    communicator.wait_for_peers(int(os.environ["PCCL_LAUNCH_COUNT"]))
    values = np.arange(4, dtype=np.float32) + int(os.environ["PCCL_LAUNCH_INDEX"])
    info = communicator.all_reduce(values)
    print(f"{values} is the sum over {info.world_size} peers")
