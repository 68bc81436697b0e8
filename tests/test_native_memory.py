"""Large pages: asked for where there are any, and memory all the same where there are none."""

import gc
import mmap
import weakref

import pytest
import torch

from kernels.native.memory import in_large_pages

has_large_pages = pytest.mark.skipif(
    not hasattr(mmap, "MADV_HUGEPAGE"), reason="no large pages to ask for on this system"
)


class Mapped(mmap.mmap):
    """Remembers what was advised; `refuses` as a kernel without large pages does."""

    advised: list
    refuses = False

    def madvise(self, advice):
        self.advised.append((len(self), advice))
        if self.refuses:
            raise OSError(22, "Invalid argument")


@pytest.fixture
def mapped(monkeypatch):
    monkeypatch.setattr(Mapped, "advised", [], raising=False)
    monkeypatch.setattr(mmap, "mmap", Mapped)
    return Mapped


def check(tensor, size):
    assert (tensor.shape, tensor.dtype) == ((size,), torch.float32)
    assert (tensor == 0).all()
    tensor.fill_(3)
    assert tensor.sum() == 3 * size


@has_large_pages
def test_linux_is_asked_for_large_pages(mapped):
    check(in_large_pages(1_000_000), 1_000_000)
    assert mapped.advised == [(4_000_000, mmap.MADV_HUGEPAGE)]


@has_large_pages
def test_a_kernel_without_them_gives_small_ones(mapped, monkeypatch):
    monkeypatch.setattr(mapped, "refuses", True)
    check(in_large_pages(5_000), 5_000)


def test_a_system_without_them_gives_small_ones(mapped, monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    check(in_large_pages(5_000), 5_000)
    assert mapped.advised == []


def test_nothing_is_nothing():
    assert in_large_pages(0).shape == (0,)


@has_large_pages
def test_memory_lives_as_long_as_a_part_of_it_and_no_longer(mapped, monkeypatch):
    made = []

    class Kept(Mapped):
        def __new__(cls, *arguments, **options):
            memory = super().__new__(cls, *arguments, **options)
            made.append(weakref.ref(memory))
            return memory

    monkeypatch.setattr(mmap, "mmap", Kept)
    part = in_large_pages(3_000)[1_000:1_010]
    gc.collect()
    assert made[0]() is not None
    assert part.tolist() == [0] * 10
    del part
    gc.collect()
    assert made[0]() is None
