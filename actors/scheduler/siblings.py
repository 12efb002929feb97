"""Samples of one prompt (``n``, ``best_of``): one of them computes it, the others take its state along.

Theory of operation
===================

Samples that are submitted together are requests of their own: ids, epochs, seeds, streams, ends. They have one thing in
common, the prompt. So the first of them *leads* and the others *follow*: a follower holds nothing and is in no queue
until the step in which its leader's prompt is complete. In that step it gets a row of its own (``BatchRow.fork_of``):
its first token is drawn from the leader's last position with its own parameters, and its memory is what the leader has:

    mixed instance     the prompt's full blocks are shared, the block that generation continues in and the slot copied
    prefill instance   everything is shared: nobody writes there, decode instances read it

From then on the two have nothing to do with each other. A follower that finds no row or no memory in that step, and
everybody whose leader ends before it, does not wait for ever: those that are left form a group again, under the first
of them, and compute the prompt once more. A sample that is attempted again or preempted later is alone.

Not shared: the prompts of requests that want log-probabilities of the prompt (every sample reports its own), and of
attempts that begin with delivered tokens (they are no longer the same text).
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf

import msgspec

from actors.scheduler.sequence import Sequence
from messages.requests import SubmitRequest


def samples_of(message: SubmitRequest) -> tuple[SubmitRequest, ...]:
    """One submission for each sample in ``message``, the one that may lead first."""
    alone = msgspec.structs.replace(message, siblings=()) if message.siblings else message
    others = (
        msgspec.structs.replace(alone, request_id=sibling.request_id, epoch=sibling.epoch, sampling=sibling.sampling)
        for sibling in message.siblings
    )
    return (alone, *others)


def gather(sequences: SequenceOf[Sequence]) -> list[Sequence]:
    """Let the first of one prompt's new sequences lead the others where that is possible; those that lead nobody's
    prompt but their own, too."""
    if any(sequence.output or sequence.sampling.prompt_logprobs >= 0 for sequence in sequences):
        return list(sequences)
    return _group(list(sequences))


def part(sequence: Sequence) -> list[Sequence]:
    """``sequence`` leads and follows no more; those that begin on their own now because it led them (one at most)."""
    if sequence.leader is not None:
        sequence.leader.followers.remove(sequence)
        sequence.leader = None
    left, sequence.followers = sequence.followers, []
    return _group(left)


def _group(sequences: list[Sequence]) -> list[Sequence]:
    for follower in sequences[1:]:
        follower.leader = sequences[0]
    for leader in sequences[:1]:
        leader.leader = None
        leader.followers = sequences[1:]
    return sequences[:1]
