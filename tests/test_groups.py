"""Which process group a sampler takes: one that comes late, one that was given, and copies of both.

In one process, with torch's stand-in for a group: whatever is gathered, all have sent the same.
"""

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import adambs


@pytest.fixture
def two_processes():
    """A function that starts the default group."""

    def start():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)

    yield start
    if dist.is_initialized():
        dist.destroy_process_group()


def test_a_group_that_comes_after_the_first_draw_is_found(two_processes):
    sampler = adambs.BanditSampler(40, 10)
    first = sampler.draw()
    assert len(first) == 10
    sampler.update(first, torch.rand(10))
    two_processes()
    later = sampler.draw()
    assert (len(later), len(later.whole)) == (5, 10)


def test_nobody_else_is_looked_for_where_none_is_wanted(two_processes):
    sampler = adambs.BanditSampler(40, 10, group=False)
    sampler.draw()
    two_processes()
    assert len(sampler.draw()) == len(copy.deepcopy(sampler).draw()) == 10


def test_a_sampler_in_shards_is_told_of_a_group_that_comes_late(two_processes):
    sampler = adambs.ShardedSampler(40, 10)
    sampler.draw()
    two_processes()
    with pytest.raises(RuntimeError, match="there are 2 processes and the sampler was built for 1"):
        sampler.draw()


def test_a_group_that_was_given_is_that_of_a_copy_and_does_not_travel(two_processes):
    two_processes()
    alone = dist.new_group([0])
    sampler = adambs.BanditSampler(40, 10, group=alone)
    assert len(sampler.draw()) == 10
    assert len(copy.deepcopy(sampler).draw()) == 10  # 5, were it the default group's
    travelled = pickle.loads(pickle.dumps(sampler))
    with pytest.raises(RuntimeError, match="groups do not travel"):
        travelled.draw()
    with pytest.raises(RuntimeError, match="groups do not travel"):
        copy.deepcopy(travelled).draw()


def test_the_default_group_is_found_anew(two_processes):
    two_processes()
    sampler = adambs.BanditSampler(40, 10)
    assert len(sampler.draw()) == 5
    for other in (copy.deepcopy(sampler), pickle.loads(pickle.dumps(sampler))):
        assert len(other.draw()) == 5


def test_each_process_has_a_candidate_to_score(two_processes):
    """What was drawn twice is scored once, unless there are fewer examples than processes then."""
    two_processes()
    sampler = adambs.BanditSampler(40, 10)
    sampler.draw()
    distinct, where = sampler._distinct(np.array([7, 3, 7, 7]))
    assert (distinct.tolist(), where.tolist()) == ([3, 7], [1, 0, 1, 1])
    distinct, where = sampler._distinct(np.array([7, 7, 7, 7]))
    assert (distinct.tolist(), where.tolist()) == ([7, 7, 7, 7], [0, 1, 2, 3])
