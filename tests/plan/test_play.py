"""The player: times of a few steps by hand, meetings of many, and who is stuck."""

from __future__ import annotations

from hpc_train.plan.play import Channel, Post, Step, Stuck, find_mismatch, play

PAIR = Channel("pair", (0, 1))
ALL = Channel("all", (0, 1, 2))


def test_a_meeting_begins_with_its_last_member_and_follows_the_one_before():
    sender = [Step(busy=1, post=Post(PAIR, "a", 10)), Step(busy=1, post=Post(PAIR, "b", 10)), Step(busy=3)]
    receiver = [
        Step(busy=4, post=Post(PAIR, "a")),
        Step(post=Post(PAIR, "b")),
        Step(waits=("a",), busy=2),
        Step(waits=("b",), busy=2),
    ]
    played = play([sender, receiver])
    # a: 4 .. 14, b: 14 .. 24; the sender's last step runs beside them, and its end waits for both.
    assert played.spans == (((0, 1), (1, 2), (2, 5)), ((0, 4), (4, 4), (14, 16), (24, 26)))
    assert played.ends == (24, 26)
    assert played.stuck == ()


def test_a_meeting_of_three_waits_for_all_and_takes_as_long_as_the_longest_says():
    processes = [[Step(busy=busy, post=Post(ALL, "x", busy)), Step(waits=("x",))] for busy in (3, 7, 5)]
    assert play(processes).ends == (14, 14, 14)


def test_processes_that_wait_for_each_other_are_stuck_where_they_wait():
    other = Channel("other", (1, 0))
    processes = [
        [Step(post=Post(PAIR, "a")), Step(post=Post(other, "b")), Step(waits=("b",))],
        [Step(post=Post(PAIR, "a")), Step(waits=("c",)), Step(post=Post(other, "b"))],
    ]
    assert play(processes).stuck == (Stuck(0, 2, "b"), Stuck(1, 1, "c"))


def test_a_post_that_nobody_meets_is_stuck_at_the_end():
    assert play([[Step(post=Post(PAIR, "a"))], []]).stuck == (Stuck(0, 1, "a"),)


def test_contents_that_differ_and_members_that_stay_away_are_a_mismatch():
    post_a, post_b = Step(post=Post(PAIR, "a")), Step(post=Post(PAIR, "b"))
    assert find_mismatch([[post_a, post_b], [post_a, post_b]]) is None
    swapped = find_mismatch([[post_a, post_b], [post_b, post_a]])
    assert swapped and (swapped.place, swapped.first, swapped.second) == (0, (0, "a"), (1, "b"))
    short = find_mismatch([[post_a, post_b], [post_a]])
    assert short and (short.place, short.first, short.second) == (1, (0, "b"), (1, None))
