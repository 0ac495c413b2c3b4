"""The demo's text, its byte-level language model in NumPy with a hand-written backward pass, AdamW and Muon.

The model maps a window of the last `K` bytes to a distribution over the next byte:

    e  = embedding[window]               (N, K*E)
    h1 = relu(e @ W_in + b_in)           (N, H)
    h2 = h1 + relu(h1 @ W_h + b_h)       (N, H)
    y  = h2 @ W_out + b_out              (N, 256)  logits
    loss = mean over N of -log softmax(y)[next byte], in nats

`W_out` and all biases start at zero, so an untrained model has a loss of exactly 8 bits per byte. All parameters are in
one flat vector with four contiguous parts; the all-reduce works on parts, the optimizer on the vector, the model on
views. A batch is `(S, K+T)` bytes: S sequences with T predictions each (N = S*T). A sequence's windows overlap, so its
bytes are embedded once and the windows are a strided view; the backward pass adds up each byte's K shifted gradients.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from math import cos, log, pi, prod
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from pccl.tools.report import ToolError

Floats: TypeAlias = NDArray[np.floating]

VOCABULARY = 256
WARM_UP_STEPS = 20
_EVALUATION_SEQUENCES = 16  # larger blocks fall out of the cache


@dataclass(frozen=True)
class ModelShape:
    """The sizes K, E and H, and the layout of the flat vector."""

    context: int = 12
    embedding: int = 32
    hidden: int = 256

    @property
    def layout(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        """The shapes of the arrays in each part, by part name, in the order of the flat vector."""
        return {
            "embedding": ((VOCABULARY, self.embedding),),
            "input": ((self.context * self.embedding, self.hidden), (self.hidden,)),
            "hidden": ((self.hidden, self.hidden), (self.hidden,)),
            "output": ((self.hidden, VOCABULARY), (VOCABULARY,)),
        }

    @property
    def size(self) -> int:
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
        """Return an initial parameter vector, which depends only on the seed."""
        random = np.random.default_rng([seed, 0])
        flat = np.zeros(self.size, np.float32)
        embedding, w_in, _, w_h, _, _, _ = self.arrays(flat)
        embedding[:] = random.normal(0, 0.5, embedding.shape)
        w_in[:] = random.normal(0, self.context**-0.5 * self.embedding**-0.5, w_in.shape)
        w_h[:] = random.normal(0, self.hidden**-0.5, w_h.shape)
        return flat


class ByteModel:
    """The model over views of one parameter vector."""

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
        """Return the mean loss of a batch `(S, K+T)` in nats, and write its gradient to `gradient`."""
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
        # This is several times faster than np.add.at over rows.
        one_hot = np.zeros((VOCABULARY, inputs.size), embedding.dtype)
        one_hot[inputs.reshape(-1), np.arange(inputs.size)] = 1
        np.matmul(one_hot, d_embedded.reshape(-1, width), out=g_embedding)
        return loss

    def bits_per_byte(self, batch: Bytes) -> float:
        """Return the mean loss of a batch `(S, K+T)` in bits per predicted byte, block by block."""
        total_nats = 0.0
        for start in range(0, batch.shape[0], _EVALUATION_SEQUENCES):
            *_, logs, targets = self._forward(batch[start : start + _EVALUATION_SEQUENCES])
            total_nats -= float(logs[np.arange(targets.size), targets].sum(dtype=np.float64))
        predictions: int = batch.shape[0] * (batch.shape[1] - self.shape.context)
        return total_nats / predictions / log(2)


class AdamW:
    """In-place Adam with decoupled weight decay and a short linear warm-up. The moments are local to each peer."""

    beta1 = 0.9
    beta2 = 0.98
    epsilon = 1e-8
    weight_decay = 0.01

    def __init__(self, like: Floats, learning_rate: float = 3e-3) -> None:
        self.learning_rate = learning_rate
        self._steps = 0
        self._mean = np.zeros_like(like)
        self._square = np.zeros_like(like)

    def rate(self, scale: float) -> float:
        """Return the learning rate of the last step."""
        return self.learning_rate * scale * min(1.0, self._steps / WARM_UP_STEPS)

    def step(self, parameters: Floats, gradient: Floats, scale: float = 1.0) -> None:
        """Update `parameters` by one step. `scale` multiplies the learning rate; `gradient` is overwritten."""
        self._steps += 1
        rate = self.rate(scale)
        unbias1 = 1 - self.beta1**self._steps
        unbias2 = 1 - self.beta2**self._steps
        self._mean += (1 - self.beta1) * (gradient - self._mean)
        np.multiply(gradient, gradient, out=gradient)
        self._square += (1 - self.beta2) * (gradient - self._square)
        parameters *= 1 - rate * self.weight_decay
        parameters -= (rate / unbias1) * self._mean / (np.sqrt(self._square / unbias2) + self.epsilon)


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalized(matrix: Floats) -> Floats:
    """Return the matrix with its singular values moved to about 1, by five steps of a quintic Newton-Schulz iteration.

    The coefficients are those of Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/.
    """
    a, b, c = NEWTON_SCHULZ
    x = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = x / max(float(np.linalg.norm(x)), 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if matrix.shape[0] > matrix.shape[1] else x


class Muon:
    """Muon (Jordan et al. 2024) for the matrices of the two hidden layers, and AdamW for all other parameters.

    A matrix moves by its orthogonalized Nesterov momentum. A matrix multiplies rows from the right here, so its columns
    are the outputs.
    """

    momentum = 0.95
    relative_rate = 3.0
    """The matrices' learning rate, relative to AdamW's."""

    def __init__(self, shape: ModelShape, like: Floats, learning_rate: float = 3e-3) -> None:
        self._shape = shape
        self._others = AdamW(like, learning_rate)
        self._means = [np.zeros_like(matrix) for matrix in self._matrices(like)]

    def _matrices(self, flat: Floats) -> tuple[Floats, Floats]:
        _, w_in, _, w_h, *_ = self._shape.arrays(flat)
        return w_in, w_h

    def step(self, parameters: Floats, gradient: Floats, scale: float = 1.0) -> None:
        """Update `parameters` by one step, like `AdamW.step`."""
        updates = []
        for mean, slope in zip(self._means, self._matrices(gradient), strict=True):
            mean += (1 - self.momentum) * (slope - mean)
            rows, columns = mean.shape
            update = orthogonalized(slope + self.momentum * (mean - slope))
            updates.append(max(1.0, columns / rows) ** 0.5 * update)
        before = [matrix.copy() for matrix in self._matrices(parameters)]
        self._others.step(parameters, gradient, scale)
        rate = self.relative_rate * self._others.rate(scale)
        for matrix, old, update in zip(self._matrices(parameters), before, updates, strict=True):
            matrix[...] = (1 - rate * self._others.weight_decay) * old - rate * update


def cosine_scale(done: float, floor: float = 0.05) -> float:
    """Return the learning rate's factor after the fraction `done` (0 to 1) of the run. It falls from 1 to `floor`."""
    return floor + (1 - floor) * 0.5 * (1 + cos(pi * min(max(done, 0.0), 1.0)))


# The text: the sources of the running Python's standard library, without tests and installed packages.

Bytes = NDArray[np.uint8]

VALIDATION_ONE_IN = 25
_SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "idle_test", "site-packages", "test", "tests"})


def split(shards: int, root: Path | None = None) -> tuple[list[list[Path]], list[Path]]:
    """Return the files of each training shard, and the files held out for validation.

    The files below `root` (default: this interpreter's standard library) are sorted by path. Every 25th is held out;
    the others go to the shards in turn. All processes of a run compute the same split.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = [path for path in root.rglob("*.py") if not _SKIPPED_FOLDERS & set(path.relative_to(root).parts)]
    if not found:
        raise ToolError(f"no Python source files below {root}: is the standard library installed as sources?")
    files = sorted(found)
    training = [file for index, file in enumerate(files) if index % VALIDATION_ONE_IN]
    if len(training) < shards:
        raise ToolError(f"{len(training)} files are too few for {shards} shards")
    return [training[shard::shards] for shard in range(shards)], files[::VALIDATION_ONE_IN]


def read(files: Iterable[Path]) -> Bytes:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def unigram_entropy_bits(text: Bytes) -> float:
    """Return the entropy of the byte frequencies in bits per byte: the minimum loss of a model that ignores context."""
    counts = np.bincount(text, minlength=256)
    frequencies = counts[counts > 0] / text.size
    return float(-(frequencies * np.log2(frequencies)).sum())


def sample(text: Bytes, random: np.random.Generator, sequences: int, length_bytes: int) -> Bytes:
    starts = random.integers(0, text.size - length_bytes + 1, sequences)
    found: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return found


def spread(text: Bytes, sequences: int, length_bytes: int) -> Bytes:
    """Return sequences that are evenly spaced over the whole text."""
    starts = np.linspace(0, text.size - length_bytes, sequences).astype(np.int64)
    found: Bytes = text[starts[:, None] + np.arange(length_bytes)]
    return found
