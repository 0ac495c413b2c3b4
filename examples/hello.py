"""The smallest whole program:

    pccl launch -n 4 examples/hello.py

Peers meet at a master, sum an array, and all hold the same result.
"""

import os
import time

import numpy as np

from pccl import Attribute, Communicator, ReduceOp

with Communicator(os.environ["PCCL_MASTER"]) as communicator:
    while communicator.get_attribute(Attribute.GLOBAL_WORLD_SIZE) < int(os.environ["PCCL_LAUNCH_COUNT"]):
        if communicator.are_peers_pending():
            communicator.update_topology()
        time.sleep(0.01)
    values = np.arange(4, dtype=np.float32) + int(os.environ["PCCL_LAUNCH_INDEX"])
    info = communicator.all_reduce(values, op=ReduceOp.SUM)
    print(f"{values} is the sum over {info.world_size} peers")
