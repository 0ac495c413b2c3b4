"""States in canonical bytes: a round trip, and equal bytes for equal states."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pccl.training.state.codec import decode, encode

torch = pytest.importorskip("torch")

LEAVES = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(max_size=20)),
    st.complex_numbers(allow_nan=False),
)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.tuples(st.integers(), st.text())), inner, max_size=4),
        st.sets(st.one_of(st.text(), st.integers()), max_size=4),
    ),
    max_leaves=12,
)


def kinds(state: Any) -> Any:
    """The types of a state, in its shape."""
    if isinstance(state, dict):
        return dict, {key: kinds(item) for key, item in state.items()}
    if isinstance(state, list | tuple):
        return type(state), [kinds(item) for item in state]
    return type(state)


@settings(max_examples=30)
@given(STATES)
def test_codec_round_trip(state: Any) -> None:
    back = decode(encode(state))
    assert back == state
    assert kinds(back) == kinds(state)
    assert encode(back) == encode(state)


def test_encoding_ignores_mapping_order() -> None:
    assert encode({"a": 1, 2: "b", ("c", 3): None}) == encode(OrderedDict([(("c", 3), None), (2, "b"), ("a", 1)]))


def test_equal_numbers_of_other_types_differ() -> None:
    assert len({encode(value) for value in (1, 1.0, True, 0.0, -0.0, 0, False, np.float64(1.0), 1 + 0j)}) == 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64", "int64", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 4), (2, 0, 3)])
def test_tensors_round_trip(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.rand(shape).mul(3).to(getattr(torch, dtype))
    back = decode(encode({"t": torch.nn.Parameter(tensor) if dtype == "float32" else tensor}))["t"]
    assert (back.dtype, back.shape, type(back)) == (tensor.dtype, tensor.shape, torch.Tensor)
    assert torch.equal(back, tensor)
    back.zero_()  # writable


def test_encoding_ignores_strides() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert encode(tensor.t().contiguous().t()) == encode(tensor)
    assert encode(tensor.view(4, 3)) != encode(tensor)
    array = np.arange(12).reshape(3, 4)
    assert encode(np.asfortranarray(array)) == encode(array)
    assert encode(array) != encode(array.astype(np.int32)) != encode(torch.from_numpy(array))
    assert np.array_equal(decode(encode(array[:, ::2])), array[:, ::2])


def test_torch_states_round_trip() -> None:
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.5)
    schedulers = [
        torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4]),
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
        torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ]
    module(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    for stateful in [optimizer, *schedulers]:
        state = stateful.state_dict()
        back = decode(encode(state))
        stateful.load_state_dict(back)
        assert encode(stateful.state_dict()) == encode(state)
    milestones = decode(encode(schedulers[0].state_dict()))["milestones"]
    assert isinstance(milestones, Counter)
    assert milestones[3] == 0
    generator = np.random.default_rng(3)
    random.seed(5)
    state = {"numpy": generator.bit_generator.state, "python": random.getstate(), "torch": torch.get_rng_state()}
    drawn = generator.random(), random.random(), torch.rand(1)
    back = decode(encode(state))
    generator.bit_generator.state = back["numpy"]
    random.setstate(back["python"])
    torch.set_rng_state(back["torch"])
    assert drawn == (generator.random(), random.random(), torch.rand(1))


def test_unknown_types_are_refused_with_path() -> None:
    with pytest.raises(ValueError, match=r"^groups/1/schedule is a builtins\.function"):
        encode({"groups": [{}, {"schedule": lambda: 0}]})
    with pytest.raises(ValueError, match=r"^a is a NumPy array of object"):
        encode({"a": np.array([None])})
    with pytest.raises(ValueError, match=r"^a is a torch tensor \(torch\.sparse_coo"):
        encode({"a": torch.eye(2).to_sparse()})
    with pytest.raises(ValueError, match="meta"):
        encode(torch.empty(2, device="meta"))
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested more than"):
        encode(endless)


@pytest.mark.parametrize(
    "data", [b"", b"\x93\x01", b"\x91\x63", b"\x93\x09\xa5float\x91\x05", b"\x92\x03\x01", b"\xc1"]
)
def test_malformed_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode(data)
