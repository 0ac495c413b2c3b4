"""An ElasticSampler in torch's DataLoader, with and without workers."""

from __future__ import annotations

import multiprocessing
from itertools import islice
from typing import Any

import pytest

from pccl.training import ElasticSampler

torch = pytest.importorskip("torch")

SIZE = 40


def alone(**options: Any) -> ElasticSampler:
    sampler = ElasticSampler(SIZE, **options)
    sampler.regroup(None)
    return sampler


def loader_of(sampler: ElasticSampler, **options: Any) -> Any:
    dataset = torch.utils.data.TensorDataset(torch.arange(SIZE))
    given = {"batch_sampler": sampler} if sampler.batch_size is not None else {"sampler": sampler, "batch_size": 6}
    if options.get("num_workers"):
        options["multiprocessing_context"] = multiprocessing.get_context("fork")
    return torch.utils.data.DataLoader(dataset, **given, **options)


def step(sampler: ElasticSampler) -> None:
    sampler.claim(None)
    sampler.commit()


@pytest.mark.parametrize("batch_size", [6, None])
def test_loader_without_workers(batch_size: int | None) -> None:
    sampler = alone(batch_size=batch_size)
    seen: list[int] = []
    for epoch in range(1, 3):
        for (batch,) in loader_of(sampler):
            assert len(batch) == 6
            seen += batch.tolist()
            step(sampler)
        assert sampler.epoch == epoch
    for epoch in range(2):
        assert sorted(seen[SIZE * epoch : SIZE * (epoch + 1)]) == list(range(SIZE))


@pytest.mark.parametrize("batch_size", [6, None])
def test_track_counts_only_handed_out_batches(batch_size: int | None) -> None:
    sampler = alone(batch_size=batch_size)
    loader = loader_of(sampler, num_workers=2, prefetch_factor=2)
    seen: list[int] = []
    for (batch,) in islice(sampler.track(loader), 2):
        seen += batch.tolist()
        step(sampler)
    assert sampler.state_dict()["begun"] == 12
    # The group changes: what the workers have ready is of the former one.
    sampler.regroup(None)
    for (batch,) in sampler.track(loader):
        seen += batch.tolist()
        step(sampler)
    assert sampler.epoch == 1
    assert sorted(seen[:SIZE]) == list(range(SIZE))
    # Another loader goes on where the model is.
    for (batch,) in sampler.track(loader_of(sampler)):
        seen += batch.tolist()
        step(sampler)
    assert sorted(seen[SIZE : 2 * SIZE]) == list(range(SIZE))


def test_track_refuses_other_loaders() -> None:
    sampler = alone(batch_size=6)
    with pytest.raises(ValueError, match="does not draw from this sampler"):
        sampler.track(torch.utils.data.DataLoader(range(SIZE), batch_size=6))


def test_failed_loader_worker_batch_is_drawn_again() -> None:
    class Dataset:
        def __getitem__(self, index: int) -> int:
            if multiprocessing.parent_process() is not None:
                raise OSError("no such file")
            return index

        def __len__(self) -> int:
            return SIZE

    sampler = alone(batch_size=6)
    context = multiprocessing.get_context("fork")
    loader = torch.utils.data.DataLoader(
        Dataset(), batch_sampler=sampler, num_workers=1, multiprocessing_context=context
    )
    with pytest.raises(OSError, match="no such file"):
        next(sampler.track(loader))
    assert sampler.drawn == 0
    (first,) = islice(sampler.track(torch.utils.data.DataLoader(Dataset(), batch_sampler=sampler)), 1)
    assert first.tolist() == next(alone(batch_size=6).batches()).tolist()
