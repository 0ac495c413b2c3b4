"""A byte-level language model in NumPy with a hand-written backward pass.

The model sees a fixed window of the last `K` bytes and gives a distribution over the next one:

    e  = embedding[window]               (N, K*E)  the window's embeddings, side by side
    h1 = relu(e @ W_in + b_in)           (N, H)
    h2 = h1 + relu(h1 @ W_h + b_h)       (N, H)
    y  = h2 @ W_out + b_out              (N, 256)  logits
    loss = mean over N of -log softmax(y)[next byte], in nats

`W_out` and all biases start at zero, so an untrained model predicts each byte with 1/256: exactly 8 bits per byte.

*One vector.* All parameters lie in one flat vector, cut into four contiguous *parts* (embedding, input, hidden,
output: each a weight matrix followed by its bias). Optimizers work on the whole vector, the all-reduce on the
parts, the model on views; none of them copies. The gradient has the same layout.

*Sequences.* A batch is `(S, K+T)` bytes: S stretches of text, each of which asks for T predictions (N = S*T rows).
The T windows of a stretch overlap, so its bytes are embedded once and the windows are a strided view of the
result; the backward pass adds up the K shifted gradients of every byte in the same way.

The dtype is that of the parameter vector: float32 in training, float64 where a test compares with finite differences.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl.demo.corpus import Bytes

Floats: TypeAlias = NDArray[np.floating]

VOCABULARY = 256
_EVALUATION_SEQUENCES = 16  # per block: larger ones fall out of the cache


@dataclass(frozen=True)
class ModelShape:
    """The sizes K, E and H of the module's docstring, and the layout of the flat vector that follows from them."""

    context: int = 12
    embedding: int = 32
    hidden: int = 256

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The shapes of each part's arrays by its name, in the order in which they lie in the flat vector."""
        return {
            "embedding": ((VOCABULARY, self.embedding),),
            "input": ((self.context * self.embedding, self.hidden), (self.hidden,)),
            "hidden": ((self.hidden, self.hidden), (self.hidden,)),
            "output": ((self.hidden, VOCABULARY), (VOCABULARY,)),
        }

    @property
    def size(self) -> int:
        """The number of elements of the flat vector."""
        return sum(prod(shape) for part in self.layout.values() for shape in part)

    def parts(self, flat: Floats) -> dict[str, Floats]:
        """Return the flat vector's contiguous parts as 1-D views, by name."""
        views, start = {}, 0
        for name, shapes in self.layout.items():
            size = sum(prod(shape) for shape in shapes)
            views[name] = flat[start : start + size]
            start += size
        return views

    def arrays(self, flat: Floats) -> tuple[Floats, ...]:
        """Return the seven arrays as shaped views: embedding, W_in, b_in, W_h, b_h, W_out, b_out."""
        views, start = [], 0
        for shapes in self.layout.values():
            for shape in shapes:
                views.append(flat[start : start + prod(shape)].reshape(shape))
                start += prod(shape)
        return tuple(views)

    def initial(self, seed: int) -> NDArray[np.float32]:
        """Return a fresh float32 parameter vector, equal on every peer that passes the same seed."""
        random = np.random.default_rng([seed, 0])
        flat = np.zeros(self.size, np.float32)
        embedding, w_in, _, w_h, _, _, _ = self.arrays(flat)
        embedding[:] = random.normal(0, 0.5, embedding.shape)
        w_in[:] = random.normal(0, self.context**-0.5 * self.embedding**-0.5, w_in.shape)
        w_h[:] = random.normal(0, self.hidden**-0.5, w_h.shape)
        return flat


class ByteModel:
    """The model over one parameter vector: it keeps views, so it follows every in-place change of the vector."""

    def __init__(self, shape: ModelShape, parameters: Floats) -> None:
        if parameters.shape != (shape.size,):
            raise ValueError(f"parameters have shape {parameters.shape}, this model needs ({shape.size},)")
        self.shape = shape
        self._arrays = shape.arrays(parameters)

    def _forward(self, batch: Bytes) -> tuple[Floats, Floats, Floats, Floats, NDArray[np.int64]]:
        """Return windows `(N, K*E)`, h1, the hidden layer's relu, log-probabilities `(N, 256)` and targets `(N,)`."""
        embedding, w_in, b_in, w_h, b_h, w_out, b_out = self._arrays
        context = self.shape.context
        sequences, positions = batch.shape[0], batch.shape[1] - context
        embedded = embedding[batch[:, :-1]]
        overlapping = np.lib.stride_tricks.as_strided(
            embedded,
            (sequences, positions, context * self.shape.embedding),
            embedded.strides,
            writeable=False,
        )
        windows = overlapping.reshape(sequences * positions, -1)
        h1 = windows @ w_in
        h1 += b_in
        np.maximum(h1, 0, out=h1)
        inner = h1 @ w_h
        inner += b_h
        np.maximum(inner, 0, out=inner)
        logs = (h1 + inner) @ w_out
        logs += b_out
        logs -= logs.max(axis=1, keepdims=True)
        logs -= np.log(np.exp(logs).sum(axis=1, keepdims=True))
        return windows, h1, inner, logs, batch[:, context:].reshape(-1).astype(np.int64)

    def loss_and_gradient(self, batch: Bytes, gradient: Floats) -> float:
        """Return the mean loss of `batch` `(S, K+T)` in nats. Its gradient goes to `gradient`."""
        embedding, w_in, _, w_h, _, w_out, _ = self._arrays
        g_embedding, g_w_in, g_b_in, g_w_h, g_b_h, g_w_out, g_b_out = self.shape.arrays(gradient)
        windows, h1, inner, logs, targets = self._forward(batch)
        rows = np.arange(targets.size)
        loss = -float(logs[rows, targets].mean())

        d_logits = np.exp(logs, out=logs)
        d_logits[rows, targets] -= 1
        d_logits /= targets.size
        np.matmul((h1 + inner).T, d_logits, out=g_w_out)
        d_logits.sum(axis=0, out=g_b_out)

        d_h2 = d_logits @ w_out.T
        d_inner = d_h2 * (inner > 0)
        np.matmul(h1.T, d_inner, out=g_w_h)
        d_inner.sum(axis=0, out=g_b_h)

        d_h1 = d_inner @ w_h.T
        d_h1 += d_h2
        d_h1 *= h1 > 0
        np.matmul(windows.T, d_h1, out=g_w_in)
        d_h1.sum(axis=0, out=g_b_in)

        context, width = self.shape.context, self.shape.embedding
        inputs = batch[:, :-1]
        sequences, positions = batch.shape[0], batch.shape[1] - context
        d_windows = (d_h1 @ w_in.T).reshape(sequences, positions, context, width)
        d_embedded = np.zeros((*inputs.shape, width), embedding.dtype)
        for offset in range(context):
            d_embedded[:, offset : offset + positions] += d_windows[:, :, offset]
        # A matrix product with the one-hot bytes: several times faster than np.add.at over rows.
        one_hot = np.zeros((VOCABULARY, inputs.size), embedding.dtype)
        one_hot[inputs.reshape(-1), np.arange(inputs.size)] = 1
        np.matmul(one_hot, d_embedded.reshape(-1, width), out=g_embedding)
        return loss

    def bits_per_byte(self, batch: Bytes) -> float:
        """Return the mean loss of `batch` `(S, K+T)` in bits per predicted byte. It takes little memory."""
        total_nats = 0.0
        for start in range(0, batch.shape[0], _EVALUATION_SEQUENCES):
            *_, logs, targets = self._forward(batch[start : start + _EVALUATION_SEQUENCES])
            total_nats -= float(logs[np.arange(targets.size), targets].sum(dtype=np.float64))
        predictions: int = batch.shape[0] * (batch.shape[1] - self.shape.context)
        return total_nats / predictions / log(2)
