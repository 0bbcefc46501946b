"""Damage to a term, a message or a sum between ranks is found in the audited update, with the rank."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import lockstep as ls
from lockstep.communicators import process
from lockstep.communicators.sums import audit, bucket, sparse
from lockstep.communicators.sums.planning import PlanSizes
from lockstep.communicators.transport.channel import Channel
from lockstep.updaters.ranks import rank_reduction, rank_sum
from tests.support.ranks import launch_on_ranks
from tests.updaters.attempt.test_audit import digest_of, run, updater_of

Call = Callable[..., Any]
KINDS = ["term", "buffer", "sent term", "sum", "sent sum"]


def flip(tensor: torch.Tensor, element: int) -> None:
    """Flip a high bit of the mantissa, also of a number in 16 bits."""
    words = tensor.view(-1).view(torch.uint8).view(-1, tensor.element_size())
    words[element % tensor.numel(), tensor.element_size() - 2] ^= 1 << 5


def zero(tensor: torch.Tensor, element: int) -> None:
    start = element % max(1, tensor.numel() - 1000)
    tensor.view(-1)[start : start + 1000] += 1.0
    tensor.view(-1)[start : start + 1000] *= 0.0


class Once:
    """Damages the first tensor that is given to it."""

    def __init__(self, harm: Callable[[torch.Tensor, int], None], element: int) -> None:
        self.harm, self.element, self.done = harm, element, False

    def __call__(self, tensor: torch.Tensor) -> None:
        if not self.done and tensor.is_floating_point() and tensor.count_nonzero():
            self.done = True
            with torch.no_grad():
                self.harm(tensor, self.element)


@contextmanager
def faulty(kind: str, once: Once) -> Iterator[None]:
    """Damage something of this rank once."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "term":

            def summed(original: Call, self: Any, *args: Any, **options: Any) -> Any:
                once(self.partials[0].tensors[0])
                return original(self, *args, **options)

            patch.setattr(rank_sum.RankSum, "sum", wrapped(rank_sum.RankSum.sum, summed))
        elif kind == "buffer":

            def buffers(original: Call, communicator: Any, own: Any, *args: Any) -> Any:
                once(own.partials[0].tensors[0])
                return original(communicator, own, *args)

            patch.setattr(rank_reduction, "sum_buffers", wrapped(rank_reduction.sum_buffers, buffers))
        elif kind == "sum":

            def added(original: Call, self: Any, segment: Any, target: torch.Tensor) -> None:
                original(self, segment, target)
                once(target)

            patch.setattr(bucket.BucketTransfer, "_sum", wrapped(bucket.BucketTransfer._sum, added))
        else:
            tag = bucket.TERMS_TAG if kind == "sent term" else bucket.SUMS_TAG

            def post(original: Call, self: Any, sends: Sequence[Any], *others: Any) -> Any:
                if others[-1] == tag and not once.done:
                    sends = [(tensor.clone(), rank) for tensor, rank in sends]
                    for tensor, _ in sends:
                        once(tensor)
                return original(self, sends, *others)

            patch.setattr(Channel, "post", wrapped(Channel.post, post))
        yield


def wrapped(original: Call, wrapper: Call) -> Call:
    return lambda *args, **options: wrapper(original, *args, **options)


def found_by(updater: ls.ParallelUpdater) -> tuple[Any, ...] | None:
    try:
        run(updater, 3)
    except ls.FaultError as error:
        return error.rank, error.update, updater.iteration, str(error)
    finally:
        updater.finalize()
    return None


@contextmanager
def in_slices(**sizes: int) -> Iterator[None]:
    """Cut audited sums into several slices, each with an owner of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(process, "AUDITED_SIZES", PlanSizes(slice=2048, whole=0, **sizes))
        yield


def work(number: int, num_devices: int, compression: Any = None) -> list[Any]:
    """Damage each kind of thing several times, and return what was to be found and what was found."""
    ls.find_communicator()
    communicator = ls.ProcessCommunicator(compression=compression)
    generator = random.Random(number)  # noqa: S311 - the same on every rank
    found = []
    for at in range(number):
        kind, rank, update = KINDS[at % len(KINDS)], generator.randrange(communicator.size), generator.randrange(2)
        once = Once(generator.choice([flip, zero]), generator.randrange(10**6))
        updater = updater_of(num_devices, communicator=communicator, audit_every=1, num_shards=6)
        with in_slices(direct=sys.maxsize):
            run(updater, update)
            with faulty(kind, once) if communicator.rank == rank else nullcontext():
                said = found_by(updater)
        done = any(communicator.gather_objects(once.done))
        found.append([kind, rank, update, done, said])
    return found


def check(number: int, num_ranks: int, num_devices: int = 1, compression: str | None = None) -> None:
    check_found(launch_on_ranks(work, num_ranks, number, num_devices, compression), KINDS)


def check_found(every: list[list[Any]], kinds: Sequence[str]) -> None:
    """Check that all ranks have found each fault, given what they return."""
    damaged = [each for each in every[0] if each[3]]
    assert {each[0] for each in damaged} == set(kinds)
    for rows in zip(*every, strict=True):
        kind, rank, update, done, said = rows[0]
        # A rank that owns nothing sends no sums, for example.
        if not done:
            assert said is None
            continue
        assert all(row[4] == said for row in rows), rows
        assert said is not None, (kind, rank, update)
        assert said[1:3] == (update, update)
        # What a rank has sent as its sum is damaged where it arrives.
        assert (said[0] == rank) == (kind != "sent sum"), (kind, rank, said)


def test_damage_between_two_ranks_is_found_and_named() -> None:
    check(5, 2)


@pytest.mark.slow
def test_damage_between_three_ranks_with_two_devices_is_found_and_named() -> None:
    check(10, 3, 2)


@pytest.mark.parametrize("compression", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_damage_to_compressed_sums_is_found_and_named(compression: str) -> None:
    check(5, 2, compression=compression)


def adds_wrongly(wrong: int, only: int | None = None) -> tuple[int | None, int, str] | None:
    """Train while one rank adds wrongly, always alike; return the rank that is named, the update and the message.

    Args:
        wrong: The rank.
        only: The parameter whose slices are wrong where the rank owns them; None for all slices, also those of others.
    """
    communicator = ls.find_communicator()
    updater = updater_of(1, communicator=communicator, audit_every=1, num_shards=6)

    def factor(segment: Any) -> int:
        return 2 if only is None or (segment.owner == wrong and segment.pieces[0].tensor == only) else 1

    def added(original: Call, self: Any, segment: Any, target: torch.Tensor) -> None:
        original(self, segment, target)
        target.mul_(factor(segment))

    def added_again(original: Call, segment: Any, terms: Any, wire: Any) -> Any:
        seals, _ = original(segment, terms, wire)
        return seals, original(segment, [factor(segment) * term for term in terms], wire)[1]

    with in_slices(), pytest.MonkeyPatch.context() as patch:
        if communicator.rank == wrong:
            patch.setattr(bucket.BucketTransfer, "_sum", wrapped(bucket.BucketTransfer._sum, added))
            patch.setattr(audit, "_added", wrapped(audit._added, added_again))
        try:
            run(updater, 10)
        except ls.FaultError as error:
            return error.rank, updater.iteration, str(error)
        finally:
            updater.finalize()
    return None


@pytest.mark.parametrize("wrong", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_rank_that_always_adds_wrongly_is_found_by_the_others(wrong: int) -> None:
    every = launch_on_ranks(adds_wrongly, 3, wrong)
    assert len(set(every)) == 1
    rank, updates, _ = every[0]
    assert rank == wrong
    # At once: it also takes part where another rank has its turn.
    assert updates == 0


def test_a_rank_that_adds_one_slice_wrongly_is_found_when_others_add_it() -> None:
    every = launch_on_ranks(adds_wrongly, 3, 1, 0)
    assert len(set(every)) == 1
    rank, updates, _ = every[0]
    assert rank == 1
    # The slices of the first parameter are the last ones.
    assert updates > 0


def test_two_ranks_that_disagree_on_sums_are_both_named() -> None:
    every = launch_on_ranks(adds_wrongly, 2, 1)
    assert len(set(every)) == 1
    rank, updates, text = every[0]
    assert (rank, updates) == (None, 0)
    assert "ranks 0, 1 have added the same terms to different sums" in text


def rounded(compression: Any, every: int) -> list[str]:
    """Train with compressed sums, in one go and with a resume."""
    ls.find_communicator()
    communicator = ls.ProcessCommunicator(compression=compression)
    first, second = (updater_of(1, communicator=communicator, audit_every=every) for _ in range(2))
    run(first, 5)
    second.load_state_dict(first.state_dict())
    return [digest_of(first, 3), digest_of(second, 3)]


@pytest.mark.parametrize("compression", [pytest.param("bf16", marks=pytest.mark.slow), "fp16"])
def test_neither_audits_nor_a_resume_change_a_bit_of_compressed_sums(compression: str) -> None:
    found = [launch_on_ranks(rounded, 2, compression, every) for every in (1, 0)]
    assert len({digest for ranks in found for digests in ranks for digest in digests}) == 1


class Words(nn.Module):
    """A sparse gradient, and a dense one."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 3, sparse=True)
        self.head = nn.Linear(3, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(tokens).mean(1))


def words_of(communicator: ls.Communicator | None, every: int) -> ls.ParallelUpdater:
    torch.manual_seed(0)
    model = Words()
    data = torch.utils.data.TensorDataset(torch.randint(40, (48, 5)), torch.randint(2, (48,)))
    return ls.ParallelUpdater(
        ls.BatchIterator(data, 16, shuffle=True, seed=3),
        torch.optim.SGD(model.parameters(), lr=0.1),
        model,
        num_shards=6,
        loss_fn=ls.supervised(nn.functional.cross_entropy),
        communicator=communicator,
        audit_every=every,
    )


SPARSE_KINDS = ["term", "sent term", "sum"]


@contextmanager
def faulty_sparse(kind: str, once: Once) -> Iterator[None]:
    """Damage something of the sparse sum of this rank once."""
    with pytest.MonkeyPatch.context() as patch:
        if kind == "term":

            def summed(original: Call, self: Any, *args: Any, **options: Any) -> Any:
                once(self.partials[0].tensors[0]._values())
                return original(self, *args, **options)

            patch.setattr(rank_sum.RankSum, "sum", wrapped(rank_sum.RankSum.sum, summed))
        elif kind == "sum":
            calls = iter(range(10**6))

            def added(original: Call, partials: Any) -> Any:
                sums = original(partials)
                # The second of the two sums is the one that the rank holds.
                if next(calls) % 2:
                    once(sums[0]._values())
                return sums

            patch.setattr(sparse, "total", wrapped(sparse.total, added))
        else:

            def sent(original: Call, channel: Channel, tensors: Sequence[torch.Tensor], source: int) -> None:
                if channel.rank == source:
                    tensors = [tensor.clone() for tensor in tensors]
                    for tensor in tensors:
                        once(tensor)
                original(channel, tensors, source)

            patch.setattr(sparse, "broadcast", wrapped(sparse.broadcast, sent))
        yield


def sparse_work(number: int) -> list[Any]:
    """Damage each kind of thing of a sparse sum, as `work` does."""
    communicator, generator = ls.find_communicator(), random.Random(number)  # noqa: S311 - the same on every rank
    found = []
    for at in range(number):
        kind, rank, update = SPARSE_KINDS[at % 3], generator.randrange(communicator.size), generator.randrange(2)
        once = Once(generator.choice([flip, zero]), generator.randrange(10**6))
        updater = words_of(communicator, 1)
        run(updater, update)
        with faulty_sparse(kind, once) if communicator.rank == rank else nullcontext():
            said = found_by(updater)
        found.append([kind, rank, update, any(communicator.gather_objects(once.done)), said])
    return found


@pytest.mark.parametrize(("num_ranks", "number"), [pytest.param(2, 6, marks=pytest.mark.slow), (3, 3)])
def test_damage_to_sparse_sums_is_found_and_named(num_ranks: int, number: int) -> None:
    check_found(launch_on_ranks(sparse_work, num_ranks, number), SPARSE_KINDS)


def of_words(every: int) -> str:
    return digest_of(words_of(ls.find_communicator(), every))


def test_audits_change_no_bit_of_sparse_sums() -> None:
    (found,) = {*launch_on_ranks(of_words, 3, 1), *launch_on_ranks(of_words, 2, 0)}
    assert found == digest_of(words_of(None, 0))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_devices"), [(2, 1), (2, 2), (3, 1), (4, 1)])
def test_a_thousand_faults(num_ranks: int, num_devices: int) -> None:
    check(250, num_ranks, num_devices)


def states(number: int) -> list[Any]:
    """Flip a bit of a weight or of a momentum of one rank, and return where it was and what was found."""
    communicator, generator = ls.find_communicator(check_every=3), random.Random(number)  # noqa: S311 - as above
    found = []
    for _ in range(number):
        rank, before, kind = generator.randrange(communicator.size), generator.randrange(1, 4), generator.randrange(2)
        element = generator.randrange(10**6)
        updater = updater_of(1, communicator=communicator, num_shards=6)
        run(updater, before)
        if communicator.rank == rank:
            optimizer = updater.get_optimizer("main")
            weight = optimizer.param_groups[0]["params"][0]
            flip(weight.data if kind else optimizer.state[weight]["momentum_buffer"], element)
        try:
            run(updater, 3)
        except ls.DisagreementError as error:
            found.append([rank, before, error.rank, error.update])
        else:
            found.append([rank, before, None, None])
        updater.finalize()
    return found


@pytest.mark.parametrize("number", [4, pytest.param(250, marks=pytest.mark.slow)])
def test_damaged_states_are_found_when_they_are_next_compared(number: int) -> None:
    every = launch_on_ranks(states, 2, number)
    for rank, before, named, update in every[0]:
        assert named == 1, (rank, before)
        assert before <= update <= before + 3
    assert [row[2:] for row in every[1]] == [row[2:] for row in every[0]]


def repeated() -> tuple[str, list[str]]:
    """Repeat an update whose sum was damaged."""
    communicator, said = ls.find_communicator(), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("lockstep").addHandler(handler)
    updater = updater_of(1, communicator=communicator, audit_every=1, on_fault="repeat")
    with faulty("sent term", Once(flip, 7)) if communicator.rank == 1 else nullcontext():
        digest = digest_of(updater)
    logging.getLogger("lockstep").removeHandler(handler)
    return digest, said


def test_an_update_is_repeated_on_all_ranks() -> None:
    alone = digest_of(updater_of(1, audit_every=0))
    for digest, said in launch_on_ranks(repeated, 2):
        assert digest == alone
        assert sum("rank 1" in each and "The update is repeated." in each for each in said) == 1


NUM_CLEAN = 20


def quiet() -> int:
    """Train through clean audits."""
    updater = updater_of(1, communicator=ls.find_communicator(), audit_every=1)
    for _ in range(NUM_CLEAN):
        assert updater.update().applied
    updater.finalize()
    return updater.iteration


def test_clean_sums_raise_no_alarm() -> None:
    assert launch_on_ranks(quiet, 3) == [NUM_CLEAN] * 3


def damaged_message() -> int | None:
    """Damage one byte of a control message of rank 1."""
    communicator = ls.find_communicator()
    with pytest.MonkeyPatch.context() as patch:
        if communicator.rank == 1:
            patch.setattr(ls.communicators.MessageTable, "write", wrapped(ls.communicators.MessageTable.write, changed))
        try:
            communicator.exchange(b"what was sent")
        except ls.FaultError as error:
            return error.rank
    return None


def changed(original: Call, self: Any, rank: int, message: bytes) -> None:
    original(self, rank, message[:-1] + b"T")


def test_a_damaged_message_is_found() -> None:
    assert launch_on_ranks(damaged_message, 2) == [1, 1]
