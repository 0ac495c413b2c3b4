"""Compressors, held against their papers' definitions in float64, and DiLoCo with them over a network."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl import Communicator, MasterNode, QuantizationOptions, Result
from pccl.training import AsyncDiLoCo, DiLoCo, OuterNesterov
from pccl.training.compression import (
    DGC,
    ARCTopK,
    Compressor,
    DCTTopK,
    Entropy,
    OneBitAdam,
    Owners,
    PerLayer,
    PowerSGD,
    RandomK,
    Sign,
    Sketch,
    TopK,
)
from pccl.training.compression.averages import first_largest
from pccl.training.compression.matrices import cosines
from pccl.training.compression.quantizers import _STEPS
from pccl.training.compression.sparse import least
from pccl.training.diloco.weighted_average import OwnedAverage
from tests.support.cluster import Background, outcomes, results, together, until
from tests.training.peers import Peer, assert_close, assert_parity, cluster_of, each_runs, new_model

SHAPES_OF_ALL = [(40, 30), (7,), (64, 128), (3, 5, 4), (1, 6), ()]
COUNT = sum(int(np.prod(shape)) for shape in SHAPES_OF_ALL)

MAKERS: dict[str, Callable[[], Compressor]] = {
    "top-k": lambda: TopK(0.1, chunk=1000),
    "random-k": lambda: RandomK(0.1),
    "sign": lambda: Sign(64),
    "PowerSGD": lambda: PowerSGD(2),
    "DCT": lambda: DCTTopK(8, chunk=16),
    "DGC": lambda: DGC(0.1, momentum=0.0, chunk=1000),
    "1-bit Adam": lambda: OneBitAdam(2, block=64),
    "sketch": lambda: Sketch(0.5, density=0.1),
    "per layer": lambda: PerLayer(COUNT // 8),
    "ARC": lambda: ARCTopK(0.1, width=8, sketch=2),
    "entropy": lambda: Entropy(1.75),
}


def vector_of(seed: int, count: int = COUNT) -> Any:
    return np.random.default_rng(seed).standard_normal(count).astype(np.float32)


def decoded(compressor: Compressor, data: bytes, count: int = COUNT) -> Any:
    out = np.zeros(count, np.float32)
    compressor.decode_add(memoryview(data), out)
    return out


def averaged(compressors: Sequence[Compressor], vectors: Sequence[Any], peers: tuple[int, ...] = (0, 1)) -> Any:
    """Return the average that all peers have computed, equal to the last bit."""
    codes = [each.compress(vector, peers) or b"" for each, vector in zip(compressors, vectors, strict=True)]
    means = [np.empty_like(vectors[0]) for _ in compressors]
    for each, mean in zip(compressors, means, strict=True):
        each.commit()
        each.average([(1 / len(codes), memoryview(code)) for code in codes], mean)
        each.step += 1
        assert mean.tobytes() == means[0].tobytes()
    return means[0]


def residuals(compressors: Sequence[Any]) -> Any:
    return np.array([each._residual for each in compressors], float)


@pytest.fixture(params=MAKERS)
def compressor(request: pytest.FixtureRequest) -> Compressor:
    made = MAKERS[request.param]()
    made.prepare(SHAPES_OF_ALL)
    return made


def test_codes_fit_their_bound_and_are_smaller(compressor: Compressor) -> None:
    for seed in range(3):
        assert len(compressor.encode(vector_of(seed))) <= compressor.bound(COUNT) < 4 * COUNT


def test_decoding_adds_to_what_is_there(compressor: Compressor) -> None:
    data = compressor.encode(vector_of(0))
    out = np.ones(COUNT, np.float32)
    compressor.decode_add(memoryview(data), out)
    np.testing.assert_allclose(out, 1 + decoded(compressor, data), atol=1e-6)


def test_zeros_decode_to_zeros(compressor: Compressor) -> None:
    assert not decoded(compressor, compressor.encode(np.zeros(COUNT, np.float32))).any()


def test_extreme_values_stay_finite(compressor: Compressor) -> None:
    for scale in (1e-42, 1e-30, 1e30):
        assert np.isfinite(decoded(compressor, compressor.encode(vector_of(0) * np.float32(scale)))).all()


def test_encoding_leaves_the_vector(compressor: Compressor) -> None:
    vector = vector_of(0)
    compressor.compress(vector, (0, 1))
    np.testing.assert_array_equal(vector, vector_of(0))


@pytest.mark.parametrize("compressor", [name for name in MAKERS if name != "sketch"], indirect=True)
def test_residuals_carry_what_was_lost_into_the_next_steps(compressor: Compressor) -> None:
    """With all peers present and no decay, the sum of what was sent differs from the sum of the vectors by the residual
    alone."""
    compressor.decay = 1.0
    sent, vector = np.zeros(COUNT), vector_of(0)
    for _ in range(30):
        sent += decoded(compressor, compressor.compress(vector, (0, 1)) or b"")
        compressor.commit()
    assert compressor._residual is not None
    np.testing.assert_allclose(sent + compressor._residual, 30 * vector, rtol=1e-3, atol=1e-2)
    once = decoded(compressor, compressor.encode(vector))
    assert np.linalg.norm(sent / 30 - vector) < 0.75 * np.linalg.norm(once - vector)


def test_values_that_overflow_are_reported() -> None:
    compressor, vector = TopK(0.1, decay=1.0), vector_of(0) * np.float32(8e37)
    assert compressor.compress(vector, (0, 1)) is not None
    compressor.commit()
    for _ in range(20):
        data = compressor.compress(vector, (0, 1))
        compressor.commit()
        if data is None:
            break
    else:
        raise AssertionError("the residual has grown beyond float32")
    assert compressor.compress(vector_of(0), (0, 1)) == compressor.encode(vector_of(0))
    vector[0] = np.nan
    assert compressor.compress(vector, (0, 1)) is None


def test_code_beyond_its_bound_is_refused() -> None:
    class Long(Whole):
        def bound(self, count: int) -> int:
            return 4

    with pytest.raises(ValueError, match="40 bytes, above its bound 4"):
        Long().compress(vector_of(0, 10), (0, 1))


def test_residual_is_decayed() -> None:
    compressor = TopK(0.1, decay=0.5)
    vector = vector_of(0)
    first = decoded(compressor, compressor.compress(vector, (0, 1)) or b"")
    compressor.commit()
    second = compressor.compress(vector, (0, 1))
    assert second == TopK(0.1).encode(vector + np.float32(0.5) * (vector - first))


def test_residual_is_left_by_an_aborted_average_and_dropped_after_a_loss() -> None:
    compressor, vector = TopK(0.1), vector_of(0)
    plain = compressor.encode(vector)
    compressor.compress(vector, (0, 1))
    assert compressor.compress(vector, (0, 1)) == plain  # the first one has not ended
    compressor.commit()
    with_residual = compressor.compress(vector, (0, 1))
    assert with_residual != plain
    assert compressor.compress(vector, (0, 1)) == with_residual
    compressor.commit()
    # Peer 1 was lost during the average.
    assert compressor.compress(vector, (0,)) == plain
    compressor.commit()
    assert compressor.compress(vector, (0, 2)) == plain  # a peer has joined
    assert compressor.compress(vector, (0, 2)) == plain
    compressor.commit()
    compressor.forget()
    assert compressor.compress(vector, (0, 2)) == plain


def test_top_k_keeps_the_largest_of_each_chunk_at_two_levels() -> None:
    vector, kept = vector_of(1, 3 * 1000 + 10), 100
    compressor = TopK(0.1, chunk=1000)
    found = decoded(compressor, compressor.encode(vector), vector.size)
    for first in range(0, 3000, 1000):
        chunk, got = vector[first : first + 1000].astype(float), found[first : first + 1000]
        places = np.sort(np.argsort(-np.abs(chunk), kind="stable")[:kept])
        np.testing.assert_array_equal(np.flatnonzero(got), places)
        sizes = np.abs(chunk[places])
        is_high = sizes >= sizes.mean()
        expected = np.where(is_high, sizes[is_high].mean(), sizes[~is_high].mean()) * np.sign(chunk[places])
        np.testing.assert_allclose(got[places], expected, rtol=2**-8)
    assert np.count_nonzero(found[3000:]) == 10
    assert TopK().bound(4096) == 4 + 256 * (4 + 1 + 1 + 2) // 8  # less than the 14 bits of the paper


def test_random_k_sends_exact_values_at_other_places_in_each_step() -> None:
    compressor, vector, seen = RandomK(0.1), vector_of(1, 1000), set()
    for _ in range(40):
        found = decoded(compressor, compressor.encode(vector), 1000)
        places = np.flatnonzero(found)
        assert len(places) == 100
        np.testing.assert_array_equal(found[places], vector[places])
        seen |= set(places.tolist())
    assert len(seen) > 950
    # The places must not change between versions: peers decode each other's.
    assert RandomK(1 / 16)._places(5, 100).tolist() == [2, 27, 36, 47, 58, 74, 97]


def test_sign_is_scaled_by_the_mean_magnitude_of_the_block() -> None:
    vector = vector_of(1, 150)
    found = decoded(Sign(64), Sign(64).encode(vector), 150)
    for first in (0, 64, 128):
        block = vector[first : first + 64].astype(float)
        np.testing.assert_allclose(found[first : first + 64], np.abs(block).mean() * np.sign(block), rtol=1e-6)


def test_power_sgd_is_a_warm_started_power_iteration() -> None:
    compressor = PowerSGD(2)
    compressor.prepare([(20, 30), (5,)])
    matrix, bias = vector_of(1, 600).reshape(20, 30), vector_of(2, 5)
    vector = np.concatenate([matrix.reshape(-1), bias])
    right = np.random.default_rng(0).standard_normal((30, 2))
    for _ in range(4):
        left, _ = np.linalg.qr(matrix.astype(float) @ right)
        right = matrix.T.astype(float) @ left
        found = decoded(compressor, compressor.encode(vector), 605)
        np.testing.assert_allclose(found[:600].reshape(20, 30), left @ right.T, atol=1e-4)
        np.testing.assert_array_equal(found[600:], bias)
    assert compressor.bound(605) == 4 * (2 * 50 + 5)


def test_dct_top_k_keeps_the_largest_coefficients() -> None:
    compressor = DCTTopK(5, chunk=8)
    compressor.prepare([(16, 24), (10,)])
    vector = vector_of(1, 16 * 24 + 10)
    found = decoded(compressor, compressor.encode(vector), vector.size)

    def dct(size: int) -> Any:
        places, rows = np.meshgrid(np.arange(size), np.arange(size))
        basis = np.sqrt(2 / size) * np.cos(np.pi * (places + 0.5) * rows / size)
        basis[0] /= np.sqrt(2)
        return basis

    def kept(chunk: Any) -> Any:
        one, other = (dct(size) for size in chunk.shape)
        coefficients = one @ chunk @ other.T
        flat = coefficients.reshape(-1)
        flat[np.argsort(-np.abs(flat))[5:]] = 0
        return one.T @ coefficients @ other

    matrix, got = vector[:384].reshape(16, 24), found[:384].reshape(16, 24)
    for row in range(0, 16, 8):
        for column in range(0, 24, 8):
            place = np.s_[row : row + 8, column : column + 8]
            np.testing.assert_allclose(got[place], kept(matrix[place].astype(float)), atol=0.03)
    for first in (384, 389):  # 5 is the largest divisor of 10 up to 8
        np.testing.assert_allclose(found[first : first + 5], vector[first : first + 5], rtol=2**-7, atol=0.02)


def test_cosines_do_not_depend_on_the_last_bits_of_a_library() -> None:
    for size in (2, 5, 32, 64):
        exact = [
            np.sqrt((2 if row else 1) / size) * np.cos(np.pi * (place + 0.5) * row / size) * 2**20
            for row in range(size)
            for place in range(size)
        ]
        distance = np.abs(np.array(exact) - np.floor(exact) - 0.5)
        assert distance.min() > 1e-6  # from where it would round to the other side
        np.testing.assert_allclose(cosines(size) @ cosines(size).T, np.eye(size), atol=1e-5)


@pytest.mark.parametrize("compressor", [name for name in MAKERS if name != "sketch"], indirect=True)
def test_residuals_and_averages_of_several_peers_add_up_to_their_vectors(compressor: Compressor) -> None:
    compressors = [compressor, copy.deepcopy(compressor)]
    vectors, total = [vector_of(seed) for seed in (0, 1)], np.zeros(COUNT)
    for each in compressors:
        each.decay = 1.0
    for _ in range(6):
        total += averaged(compressors, vectors)
    np.testing.assert_allclose(
        total + np.mean(residuals(compressors), axis=0), 6 * np.mean(vectors, axis=0), rtol=1e-3, atol=1e-2
    )


def test_dgc_corrects_masks_and_clips_momentum() -> None:
    compressor, velocity, residual = (
        DGC(1 / 8, momentum=0.5, clip=60.0, warmup=0, chunk=64),
        np.zeros(640),
        np.zeros(640),
    )
    for seed in range(5):
        vector = vector_of(seed, 640) * np.float32(1 + seed)
        clipped = vector.astype(float) * min(1.0, 60 / np.sqrt(4) / np.linalg.norm(vector.astype(float)))
        velocity = 0.5 * velocity + clipped
        residual += velocity
        found = decoded(compressor, compressor.compress(vector, (0, 1, 2, 3)) or b"", 640)
        chunks = np.abs(residual).reshape(-1, 64)
        is_sent = (chunks >= np.sort(chunks, axis=1)[:, -8, None]).reshape(-1)
        np.testing.assert_array_equal(found != 0, is_sent)
        # In the paper, all of a sent element is sent.
        residual = np.where(is_sent, residual - found, residual)
        velocity = np.where(is_sent, 0, velocity)
        before = compressor._velocity
        compressor.compress(vector, (0, 1, 2, 3))  # as after an aborted average
        assert compressor._velocity is before
        compressor.commit()
        np.testing.assert_allclose(np.asarray(compressor._velocity), velocity, atol=1e-4)
        np.testing.assert_allclose(residuals([compressor])[0], residual, atol=1e-4)
    plain = compressor.compress(vector, (0, 1))
    assert compressor._velocity is None
    compressor.forget()
    assert compressor.compress(vector, (0, 1)) == plain


def test_dgc_lowers_the_density_as_in_the_paper() -> None:
    compressor, found = DGC(0.001, warmup=4, chunk=1 << 16), []
    for compressor.step in range(7):
        found.append(
            np.count_nonzero(decoded(compressor, compressor.encode(vector_of(0, 1 << 16)), 1 << 16)) / (1 << 16)
        )
    assert found == pytest.approx([0.25, 0.0625, 0.015625, 0.004, 0.001, 0.001, 0.001], rel=0.02)


def test_one_bit_adam_freezes_the_variances_of_the_warm_up() -> None:
    scales = np.repeat(np.array([0.1, 1, 10, 100], np.float32), 64)
    compressors = [OneBitAdam(3, block=128) for _ in range(2)]
    squares = np.zeros(256)
    for step in range(3):
        vectors = [scales * vector_of(2 * step + peer, 256) for peer in range(2)]
        mean = averaged(compressors, vectors)
        assert (np.abs(mean - np.mean(vectors, axis=0)) < 0.02 * scales).all()
        squares += mean.astype(float) ** 2 / 3
    deviations = np.maximum(np.sqrt(squares), np.sqrt(squares).max() / 256)
    for step in range(3, 6):
        vectors = [scales * vector_of(2 * step + peer, 256) for peer in range(2)]
        expected = np.zeros(256)
        for each, vector in zip(compressors, vectors, strict=True):
            whole = (vector + each._residual) / deviations
            for block in (slice(0, 128), slice(128, 256)):
                expected[block] += np.sign(whole[block]) * np.abs(whole[block]).mean() / 2
        np.testing.assert_allclose(averaged(compressors, vectors), expected * deviations, rtol=1e-4)


def test_one_bit_adam_measures_variances_again_with_a_new_peer() -> None:
    compressors = [OneBitAdam(2, block=64) for _ in range(2)]
    for seed in range(3):
        averaged(compressors, [vector_of(seed), vector_of(seed)])
    averaged(compressors[:1], [vector_of(0)], (0,))  # peer 1 was lost: the others go on
    assert compressors[0].encode(vector_of(0))[0] == 2
    newcomer = OneBitAdam(2, block=64)
    newcomer.step = compressors[0].step
    compressors = [compressors[0], newcomer]
    for _ in range(2):
        averaged(compressors, [vector_of(0), vector_of(0)], (0, 2))
        assert compressors[0]._squares is None or compressors[0].encode(vector_of(0))[0] == 1
    assert [each.encode(vector_of(0))[0] for each in compressors] == [2, 2]


def test_one_bit_adam_decodes_what_peers_send_that_do_not_agree_about_a_newcomer() -> None:
    """Only one of two has seen a peer that joined and was lost."""
    compressors = [OneBitAdam(1, block=64) for _ in range(2)]
    averaged(compressors, [vector_of(0), vector_of(1)])
    codes = [
        each.compress(vector_of(2), peers) or b"" for each, peers in zip(compressors, [(0, 1, 2), (0, 1)], strict=True)
    ]
    assert [code[0] for code in codes] == [0, 2]
    means = [np.empty(COUNT, np.float32) for _ in compressors]
    for each, mean in zip(compressors, means, strict=True):
        each.average([(0.5, memoryview(code)) for code in codes], mean)
    assert means[0].tobytes() == means[1].tobytes()
    np.testing.assert_array_equal(compressors[0]._deviations, compressors[1]._deviations)


def test_sketch_finds_what_only_the_sum_of_the_vectors_has() -> None:
    """Neither peer's own largest elements are: they cancel in the sum."""
    random, count = np.random.default_rng(0), 5000
    noise, common = random.standard_normal((2, count)), np.zeros(count)
    heavy = np.sort(random.choice(count, 20, replace=False))
    common[heavy] = np.where(random.integers(2, size=20), 30.0, -30.0)
    apart = np.zeros(count)
    apart[random.choice(np.setdiff1d(np.arange(count), heavy), 200, replace=False)] = 100
    vectors = [(common + noise[0] + apart).astype(np.float32), (common + noise[1] - apart).astype(np.float32)]
    compressors = [Sketch(0.5, density=20 / count) for _ in range(2)]
    found = averaged(compressors, vectors)
    np.testing.assert_array_equal(np.flatnonzero(found), heavy)
    np.testing.assert_allclose(found[heavy], common[heavy], atol=8)
    for each, vector in zip(compressors, vectors, strict=True):
        np.testing.assert_array_equal(each._residual, np.where(found == 0, vector, 0))


def test_sketch_estimates_by_medians_of_signed_counters() -> None:
    sketch, vector, count = Sketch(0.5, rows=3, density=1.0), vector_of(0, 300), 300
    hashes = [list(zip(*each, strict=True)) for each in sketch._hashes(count)]
    table = np.zeros((3, 50))
    for row, places in enumerate(hashes):
        for (column, sign), value in zip(places, vector, strict=True):
            table[row, column] += sign * value
    expected = [
        np.median([sign * table[row, hashes[row][place][0]] for row, sign in enumerate(signs)])
        for place in range(count)
        for signs in [[each[place][1] for each in hashes]]
    ]
    np.testing.assert_allclose(decoded(sketch, sketch.encode(vector), count), expected, rtol=2**-8)
    sketch.step = 1
    assert [each[0][:5].tolist() for each in sketch._hashes(count)] != [
        [column for column, _ in row[:5]] for row in hashes
    ]
    # The places must not change between versions.
    columns, signs = next(Sketch()._hashes(1000))
    assert [columns[:5].tolist(), signs[:5].tolist()] == [[21, 17, 24, 33, 21], [-1, 1, 1, 1, -1]]


def test_arc_top_k_sends_the_rows_that_are_largest_in_the_average_on_all_peers() -> None:
    random = np.random.default_rng(0)
    scales = (1.3 ** random.permutation(32)).repeat(16).astype(np.float32)
    vectors = [vector_of(seed, 512) * scales for seed in (0, 1)]
    compressors = [ARCTopK(0.25, width=16, sketch=512) for _ in range(2)]  # so many that the norms are almost exact
    averaged(compressors, vectors)
    for _ in range(2):
        waiting = np.mean(residuals(compressors), axis=0).reshape(32, 16)
        largest = np.argsort(-np.linalg.norm(waiting, axis=1))[:8]
        for each, vector in zip(compressors, vectors, strict=True):
            sent = decoded(each, each.encode(vector), 512).reshape(32, 16)
            np.testing.assert_array_equal(np.flatnonzero(sent.any(axis=1)), np.sort(largest))
            np.testing.assert_allclose(sent[largest], vector.reshape(32, 16)[largest], rtol=2**-8)
        averaged(compressors, vectors)


def test_first_largest_is_a_stable_selection() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        sizes = random.integers(0, 5, 40).astype(np.float32)
        count = int(random.integers(1, 41))
        np.testing.assert_array_equal(first_largest(sizes, count), np.sort(np.argsort(-sizes, kind="stable")[:count]))


def test_densities_of_layers_minimize_the_error_within_the_budget() -> None:
    random = np.random.default_rng(0)
    for _ in range(20):
        costs = [[0, *random.integers(1, 12, 3).tolist()] for _ in range(5)]
        errors = [random.random(4).tolist() for _ in range(5)]

        def error(choices: Sequence[int], errors: Any = errors) -> float:
            return float(sum(row[choice] for row, choice in zip(errors, choices, strict=True)))

        possible = [
            choices
            for choices in product(range(4), repeat=5)
            if sum(row[choice] for row, choice in zip(costs, choices, strict=True)) <= 20
        ]
        found = least(costs, errors, 20)
        assert tuple(found) in possible
        assert error(found) == pytest.approx(min(map(error, possible)))


def test_per_layer_gives_the_bytes_to_the_layers_that_need_them() -> None:
    shapes = [(100, 40), (4000,), (0,), (3,)]
    compressor, plain = PerLayer(520), TopK(1 / 16)
    compressor.prepare(shapes)
    vector = np.concatenate([vector_of(0, 4000) * 10, vector_of(1, 4000), vector_of(2, 3)])
    data = compressor.encode(vector)
    assert len(data) <= compressor.bound(vector.size) == plain.bound(vector.size) == 520
    found = decoded(compressor, data, vector.size)
    assert np.count_nonzero(found[:4000]) > 2 * np.count_nonzero(found[4000:8000])
    assert np.linalg.norm(vector - found) < np.linalg.norm(vector - decoded(plain, plain.encode(vector), vector.size))
    with pytest.raises(ValueError, match="above a byte for each of 4 tensors"):
        PerLayer(4).prepare(shapes)


@pytest.mark.parametrize("wrong", [lambda: TopK(0), lambda: TopK(2), lambda: RandomK(0), lambda: Sign(7)])
def test_wrong_settings_are_refused(wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="must be"):
        wrong()
    with pytest.raises(ValueError, match="must be at least 1"):
        PowerSGD(0)
    with pytest.raises(ValueError, match="must be at least 1"):
        DCTTopK(0)
    for more in (lambda: DGC(momentum=1), lambda: OneBitAdam(0), lambda: Sketch(rows=2), lambda: ARCTopK(width=0)):
        with pytest.raises(ValueError, match="must be"):
            more()


class Whole(Compressor):
    """Sends everything."""

    decay = 0.0

    def __repr__(self) -> str:
        return "Whole()"

    def bound(self, count: int) -> int:
        return 4 * count + 3

    def encode(self, vector: Any) -> bytes:
        return bytes(vector.tobytes())

    def decode_add(self, data: memoryview, out: Any) -> None:
        out += np.frombuffer(data, np.float32)


def close(peers: list[Peer]) -> None:
    together([peer.close for peer in peers])


def cluster_with(master: MasterNode, count: int, make: Callable[[], Any], **options: Any) -> list[Peer]:
    peers = [Peer(master.address, number, compression=make(), **options) for number in range(count)]
    together([partial(peer.enter, count) for peer in peers])
    return peers


def test_wrong_compressors_are_refused() -> None:
    with pytest.raises(TypeError, match="Owners needs compressors, not '2bit'"):
        Owners("2bit")  # type: ignore[arg-type]
    for decay in (-1.0, 5.0, float("nan")):
        for wrong in (TopK(0.5, decay=decay), Owners(Whole(), TopK(0.5, decay=decay))):
            with pytest.raises(ValueError, match="decay must be from 0 to 1"):
                DiLoCo(Communicator("127.0.0.1:1"), new_model(), compression=wrong)


def test_one_compressor_object_serves_several_trainers(master: MasterNode) -> None:
    with MasterNode("127.0.0.1:0") as other:
        separate = cluster_with(other, 2, lambda: TopK(0.5, chunk=8))
        each_runs(separate, 4)
        close(separate)
    shared = TopK(0.5, chunk=8)
    peers = cluster_with(master, 2, lambda: shared)
    each_runs(peers, 4)
    assert_parity(peers)
    assert peers[0].digests == separate[0].digests
    close(peers)


def test_average_of_whole_vectors_is_that_of_plain_diloco(master: MasterNode) -> None:
    with MasterNode("127.0.0.1:0") as other:
        plain = cluster_of(other, 3)
        each_runs(plain, 4)
        close(plain)
    peers = cluster_with(master, 3, Whole)
    each_runs(peers, 4)
    assert_parity(peers)
    assert_close(peers[0].model, plain[0].model)
    close(peers)


@pytest.mark.parametrize("name", MAKERS)
def test_all_peers_have_the_same_bytes(master: MasterNode, name: str) -> None:
    peers = cluster_with(master, 3, MAKERS[name], outer=OuterNesterov(0.7, 0.0))
    each_runs(peers, 6)
    assert_parity(peers)
    assert peers[0].worlds == [3] * 6
    close(peers)


@pytest.mark.parametrize("make", [Whole, lambda: Owners(Whole())])
def test_weights_count(master: MasterNode, make: Callable[[], Any]) -> None:
    peers = cluster_with(master, 2, make, outer=OuterNesterov(1.0, 0.0))
    for peer in peers:
        for array in peer.model.values():
            array -= np.float32(peer.number)
    together([partial(peer.diloco.outer_step, weight=3.0 - 2 * peer.number) for peer in peers])
    assert_close(peers[0].model, {name: array - np.float32(0.25) for name, array in new_model().items()})
    assert peers[0].diloco.digest() == peers[1].diloco.digest()
    close(peers)


@pytest.mark.parametrize("make", [lambda: Sign(8), lambda: Owners(Sign(8))])
def test_weight_zero_leaves_a_peer_out(master: MasterNode, make: Callable[[], Any]) -> None:
    peers = cluster_with(master, 2, make)
    for array in peers[1].model.values():
        array[...] = np.nan
    together([partial(peer.diloco.outer_step, weight=weight) for peer, weight in zip(peers, [8.0, 0.0], strict=True)])
    assert peers[0].diloco.digest() == peers[1].diloco.digest()
    assert all(np.isfinite(array).all() for array in peers[1].model.values())
    before = {name: array.copy() for name, array in peers[0].model.items()}
    peers[0].diloco._momentum[...] = peers[1].diloco._momentum[...] = 0
    together([partial(peer.diloco.outer_step, weight=0.0) for peer in peers])
    assert_close(peers[0].model, before)
    close(peers)


@pytest.mark.parametrize(
    "make",
    [
        lambda: TopK(0.5, chunk=8),
        lambda: Owners(TopK(0.5, chunk=8)),
        lambda: DGC(0.5, chunk=8),
        lambda: OneBitAdam(1),
        lambda: Sketch(0.5),
        lambda: ARCTopK(0.5, width=4),
    ],
    ids=["top-k", "owners", "DGC", "1-bit Adam", "sketch", "ARC"],
)
def test_peer_lost_during_average_is_left_out(master: MasterNode, make: Callable[[], Any]) -> None:
    peers = cluster_with(master, 3, make)
    leaver = peers.pop()
    threads = [Background(partial(peer.run, 5)) for peer in peers]
    leaver.run(2)
    until(lambda: all(peer.communicator.stats["ops_open"] for peer in peers), "the others are in the third average")
    leaver.close()
    for thread in threads:
        thread.result()
    assert_parity([*peers, leaver])
    assert [peer.worlds for peer in peers] == [[3, 3, 2, 2, 2]] * 2
    newcomer = Peer(master.address, 2, compression=make())

    def three_have_met_twice(peer: Peer) -> bool:
        return peer.worlds[-2:] == [3, 3]

    threads = [Background(partial(peer.run, three_have_met_twice)) for peer in peers]
    newcomer.enter().run(three_have_met_twice)
    for thread in threads:
        thread.result()
    assert_parity([*peers, newcomer])
    close([*peers, newcomer])


@pytest.mark.parametrize("make", [lambda: TopK(0.5, chunk=8), lambda: Owners(TopK(0.5, chunk=8))])
def test_movement_that_is_not_finite_fails_on_all_peers(master: MasterNode, make: Callable[[], Any]) -> None:
    peers = cluster_with(master, 2, make)
    peers[1].model["bias"][0] = np.nan
    errors = outcomes([peer.diloco.outer_step for peer in peers])
    assert results(errors) == [Result.INVALID_ARGUMENT] * 2
    assert len({str(error) for error in errors}) == 1
    close(peers)


@pytest.mark.parametrize("make", [lambda: Sign(8), lambda: Owners(Sign(8))])
def test_movement_that_is_not_finite_is_left_out(master: MasterNode, make: Callable[[], Any]) -> None:
    peers = cluster_with(master, 3, make, on_nonfinite="leave out")
    peers[1].model["bias"][0] = np.nan
    steps = together([peer.step for peer in peers])
    assert [step.world_size for step in steps] == [2, 2, 2]
    each_runs(peers, 3)
    assert_parity(peers)
    close(peers)


def test_unlike_compressors_are_refused(master: MasterNode) -> None:
    peers = [Peer(master.address, number, compression=Sign(8 + 8 * number)) for number in range(2)]

    errors = outcomes([partial(peer.enter, 2) for peer in peers])
    assert results(errors) == [Result.INVALID_ARGUMENT] * 2
    assert all("compression=Sign(block=16" in str(error) for error in errors)


def test_compression_excludes_quantization(master: MasterNode) -> None:
    peer = Peer(master.address, 0)
    with pytest.raises(ValueError, match="either"):
        DiLoCo(peer.communicator, peer.model, compression=Sign(), quantization=QuantizationOptions())
    with pytest.raises(ValueError, match="all of it"):
        DiLoCo(peer.communicator, peer.model, compression="all of it")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be one of"):
        DiLoCo(peer.communicator, peer.model, compression=2)  # type: ignore[arg-type]


def test_entropy_rounds_to_five_levels_of_each_block() -> None:
    vector = vector_of(1, 2944) * np.repeat(np.exp2(np.arange(-30, 16, dtype=np.float32)), 64)[:2944]
    compressor = Entropy(1.75)
    data = compressor.encode(vector)
    found = decoded(compressor, data, 2944).astype(float)
    assert compressor.bound(2944) == 644
    assert 600 < len(data) <= 644
    relative = np.concatenate(
        [block / 2 ** (np.round(4 * np.log2(np.sqrt(np.mean(block**2)))) / 4) for block in blocks_of(vector)]
    )
    steps = np.abs(relative[found != 0]).min(), np.abs(relative[found == 0]).max()
    assert 0.5 * 0.7 < steps[1] <= steps[0] < 2  # zeros are those nearest to 0
    step = min(_STEPS, key=lambda each: abs(each - sum(steps)))
    levels = np.clip(np.round(relative / step), -2, 2)
    means = np.array([0, *(np.abs(relative)[np.abs(levels) == level].mean() for level in (1, 2))])
    expected = np.sign(levels) * means[np.abs(levels).astype(int)] * vector / np.where(relative, relative, 1)
    np.testing.assert_allclose(found, expected, rtol=2**-7)


def blocks_of(vector: Any) -> list[Any]:
    return [vector[first : first + 64].astype(float) for first in range(0, vector.size, 64)]


@given(
    st.lists(st.floats(-(2.0**18), 2.0**18, width=32), max_size=300),
    st.sampled_from([1.0, 1.75, 2.25]),
    st.sampled_from([8, 64]),
)
@settings(max_examples=200, deadline=None)
def test_entropy_codes_any_vector_within_its_bound(values: list[float], bits: float, block: int) -> None:
    compressor, vector = Entropy(bits, block), np.array(values, np.float32)
    data = compressor.encode(vector)
    assert len(data) <= compressor.bound(vector.size)
    found = decoded(compressor, data, vector.size)
    assert (found * vector >= 0).all()
    assert np.linalg.norm(found - vector) <= 1.2 * np.linalg.norm(vector) + 1e-6


def test_entropy_sends_every_element_of_a_small_vector_in_time() -> None:
    for count in (1, 7, 40, 300, 1000):
        compressor, vector, sent = Entropy(1.0, decay=1.0), vector_of(3, count), np.zeros(count)
        for _ in range(60):
            sent += decoded(compressor, compressor.compress(vector, (0, 1)) or b"", count)
            compressor.commit()
        np.testing.assert_allclose(sent / 60, vector, atol=0.3)


def test_entropy_decodes_to_the_same_bits_everywhere() -> None:
    data = bytes.fromhex("343fca3f5a7fdb0d2080c2830ccdb9a43c01020c00")
    assert decoded(Entropy(block=8), data, 20).tobytes().hex() == (
        "0000000000000000f68efe3e00000000f68efebef68efe3ee8d58e3fe8d58e3faa0e56ba4738f0ba"
        "aa0e56ba000000004738f0ba000000004738f0baaa0e56ba70dca9c3825c17c3825c174370dca943"
    )


# Averages through owners.


class Growing(Whole):
    """Sends everything, with up to three further bytes, so that lengths differ."""

    def encode(self, vector: Any) -> bytes:
        return super().encode(vector) + bytes(int(abs(vector.sum()) * 100) % 4)

    def decode_add(self, data: memoryview, out: Any) -> None:
        out += np.frombuffer(data[: 4 * out.size], np.float32)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_owners_average_whole_vectors_like_plain_diloco(master: MasterNode, count: int) -> None:
    with MasterNode("127.0.0.1:0") as other:
        plain = cluster_of(other, count)
        each_runs(plain, 3)
        close(plain)
    peers = cluster_with(master, count, lambda: Owners(Growing()))
    each_runs(peers, 3)
    assert_parity(peers)
    assert peers[0].worlds == [count] * 3
    assert_close(peers[0].model, plain[0].model)
    close(peers)


def signs(vector: Any) -> Any:
    """Sign(8), in float64."""
    return np.concatenate([np.sign(x) * np.abs(x).mean() for x in np.split(vector, range(8, vector.size, 8))])


class Owned:
    """Averages of one vector through owners, without a training loop."""

    def __init__(self, peer: Peer, owners: Owners) -> None:
        self.communicator, self.owners, self.steps = peer.communicator, owners, 0

    def begin(self, vector: Any, weight: float | None = None) -> OwnedAverage:
        self.steps += 1
        return OwnedAverage(self.communicator, vector, 50, 51, self.steps, self.owners, weight, 1.0)

    def average(self, vector: Any, weight: float | None = None) -> Any:
        self.begin(vector, weight).wait()
        return vector


def owned_by(peers: list[Peer], make: Callable[[], Owners]) -> list[Owned]:
    return [Owned(peer, make()) for peer in peers]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_owners_average_what_was_decoded_and_keep_residuals(master: MasterNode, count: int) -> None:
    peers = cluster_of(master, count)
    owned = owned_by(peers, lambda: Owners(Sign(8, decay=0.5), Sign(8, decay=0.25)))
    weights = [1.0 + number for number in range(count)]
    edges = [rank * 100 // count for rank in range(count + 1)]
    ups, downs = [np.zeros(100) for _ in peers], np.zeros(100)
    for step in range(3):
        vectors = [vector_of(10 * step + number, 100) for number in range(count)]
        found = together(
            [partial(each.average, v.copy(), w) for each, v, w in zip(owned, vectors, weights, strict=True)]
        )
        for begin, end in pairwise(edges):
            part, mean = slice(begin, end), np.zeros(end - begin)
            for up, vector, weight in zip(ups, vectors, weights, strict=True):
                wanted = vector[part] + 0.5 * up[part]
                up[part] = wanted - signs(wanted)
                mean += signs(wanted) * weight / sum(weights)
            mean += 0.25 * downs[part]
            downs[part] = mean - signs(mean)
            np.testing.assert_allclose(found[0][part], signs(mean), atol=1e-4)
        assert len({each.tobytes() for each in found}) == 1
    close(peers)


def test_peer_lost_between_the_ops_of_owners_is_left_out(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    owned = owned_by(peers, lambda: Owners(Whole()))
    together([partial(each.average, vector_of(number)) for number, each in enumerate(owned)])
    threads = [Background(partial(each.average, vector_of(number))) for number, each in enumerate(owned[:2])]
    assert owned[2].begin(vector_of(2))._wait_for_exchange().world_size == 3
    peers.pop().close()
    found = [thread.result() for thread in threads]
    np.testing.assert_allclose(found[0], (vector_of(0) + vector_of(1)) / 2, atol=1e-5)
    assert found[0].tobytes() == found[1].tobytes()
    assert [len(each.owners.parts) for each in owned[:2]] == [2, 2]
    together([partial(each.average, vector_of(number)) for number, each in enumerate(owned[:2])])
    close(peers)


def test_last_peer_of_owners_keeps_its_vector(master: MasterNode) -> None:
    peers = cluster_of(master, 2)
    owned = owned_by(peers, lambda: Owners(Sign(8)))
    thread = Background(partial(owned[0].average, vector_of(0)))
    owned[1].begin(vector_of(1))._wait_for_exchange()
    peers.pop().close()
    np.testing.assert_array_equal(thread.result(), vector_of(0))
    close(peers)


def test_exchange_launched_for_a_former_group_is_launched_again(master: MasterNode) -> None:
    peers = cluster_of(master, 3)
    owned = owned_by(peers, lambda: Owners(Whole()))

    class Late(OwnedAverage):
        launches = 0

        def _launch_exchange(self) -> Any:
            self.launches += 1
            if self.launches > 1:
                return super()._launch_exchange()
            options: Any = {"send_counts": [1] * 4, "recv_counts": [1] * 4, "tag": 50, "step": 1}
            return self._communicator.launch.all_to_all(np.zeros(4, np.uint8), **options)

    def late() -> Any:
        vector = vector_of(2)
        Late(peers[2].communicator, vector, 50, 51, 1, owned[2].owners, None, 1.0).wait()
        return vector

    calls: list[Callable[[], Any]] = [partial(each.average, vector_of(i)) for i, each in enumerate(owned[:2])]
    found = together([*calls, late])
    np.testing.assert_allclose(found[0], sum(vector_of(i) for i in range(3)) / 3, atol=1e-5)
    assert len({each.tobytes() for each in found}) == 1
    # Peers that disagree for another reason all fail.
    sizes = [100, 100, 200]
    errors = outcomes([partial(each.average, vector_of(0, n)) for each, n in zip(owned, sizes, strict=True)])
    assert results(errors) == [Result.INVALID_ARGUMENT] * 3
    close(peers)


def test_mean_beyond_its_encoding_fails_on_all_peers(master: MasterNode) -> None:
    class Doubling(Whole):
        def decode_add(self, data: memoryview, out: Any) -> None:
            out += 2 * np.frombuffer(data, np.float32)

    peers = cluster_of(master, 2)
    owned = owned_by(peers, lambda: Owners(Whole(), Doubling()))
    vectors = [np.full(10, 3e38, np.float32) for _ in peers]
    errors = outcomes([partial(each.average, vector) for each, vector in zip(owned, vectors, strict=True)])
    assert results(errors) == [Result.INVALID_ARGUMENT] * 2
    assert all("too large" in str(error) for error in errors)
    close(peers)


OWNERS_ASYNC: dict[str, Callable[[], Any]] = {
    "compressor": lambda: TopK(0.5, chunk=8),
    "owners": lambda: Owners(TopK(0.5, chunk=8), Entropy()),
}


@pytest.mark.parametrize("name", OWNERS_ASYNC)
def test_fragments_have_compressors_of_their_own(master: MasterNode, name: str) -> None:
    peers = cluster_with(master, 3, OWNERS_ASYNC[name], kind=AsyncDiLoCo, fragments=2)
    each_runs(peers, 5)
    assert_parity(peers)
    assert peers[0].worlds == [0, 3, 3, 3, 3, 3]
    first, second = peers[0].diloco._coders
    assert first is not second
    together([peer.diloco.finish for peer in peers])
    assert len({peer.diloco.digest() for peer in peers}) == 1
    close(peers)


AVERAGING = ("1-bit Adam", "sketch", "ARC")
"""Compressors that need the codes of all peers."""


@pytest.mark.parametrize("name", AVERAGING)
def test_owners_refuse_compressors_that_need_the_codes_of_all_peers(name: str) -> None:
    with pytest.raises(ValueError, match="averages the codes of all peers: use it without Owners"):
        Owners(TopK(), MAKERS[name]())


@pytest.mark.parametrize("name", [each for each in MAKERS if each not in AVERAGING])
def test_all_peers_have_the_same_bytes_from_owners(master: MasterNode, name: str) -> None:
    peers = cluster_with(master, 3, lambda: Owners(MAKERS[name](), Entropy()), outer=OuterNesterov(0.7, 0.0))
    each_runs(peers, 6)
    assert_parity(peers)
    close(peers)
