"""Data parallelism with JAX: each peer computes gradients on its own batch, and all apply the same average.

    pip install jax
    pccl launch -n 2 examples/jax_regression.py

A `jax.Array` is immutable. So an average is returned in a new array, `info.array`, and the shared state keeps its own
copy of the parameters: set `state.tree` before a sync, and read it afterwards as new arrays. Kill a process and start
it again with the command that `pccl launch` prints: it fetches the parameters and continues with the others.
"""

import os
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from pccl import Communicator, PCCLError, ReduceOp, SharedState

STEPS = 100
LEARNING_RATE = 0.1


def loss_of(parameters: Any, inputs: Any, targets: Any) -> Any:
    hidden = jnp.tanh(inputs @ parameters["hidden"] + parameters["bias"])
    return jnp.mean((hidden @ parameters["output"] - targets) ** 2)


def gradients_of(parameters: Any, key: Any) -> tuple[Any, Any]:
    """Return the loss on a random batch, and its gradients as one flat array."""
    inputs = jax.random.normal(key, (64, 8))
    targets = jnp.sin(inputs[:, :1] + inputs[:, 1:2])
    loss, gradients = jax.value_and_grad(loss_of)(parameters, inputs, targets)
    return loss, ravel_pytree(gradients)[0]


def updated(parameters: Any, gradients: Any) -> Any:
    flat, unravel = ravel_pytree(parameters)
    return unravel(flat - LEARNING_RATE * gradients)


def main() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    parameters = {
        "hidden": jax.random.normal(keys[0], (8, 32)) / 3,
        "bias": jnp.zeros(32),
        "output": jax.random.normal(keys[1], (32, 1)) / 6,
    }
    own_key = jax.random.key(os.getpid())
    compute, update = jax.jit(gradients_of), jax.jit(updated)
    with Communicator(os.environ["PCCL_MASTER"]) as comm:
        state = SharedState.from_pytree(parameters)
        while state.revision < STEPS:
            state.tree = parameters
            if comm.admit_peers(state):
                parameters = state.tree
            if comm.world_size < 2:
                time.sleep(0.05)
                continue
            loss, gradients = compute(parameters, jax.random.fold_in(own_key, state.revision))
            try:
                info = comm.all_reduce(gradients, op=ReduceOp.AVG)
            except PCCLError as error:
                print(f"step {state.revision}: {error}", flush=True)
                continue  # a peer was lost, so all others repeat the step
            parameters = update(parameters, info.array)
            state.revision += 1
            if state.revision % 25 == 0:
                print(f"step {state.revision} of {info.world_size} peers: loss {loss:.4f}", flush=True)
        total = sum(float(jnp.sum(leaf)) for leaf in jax.tree_util.tree_leaves(parameters))
        print(f"the parameters sum up to {total:.9f}")


if __name__ == "__main__":
    main()
