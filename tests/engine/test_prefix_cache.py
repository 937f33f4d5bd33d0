import random

from mlcrouter_nb.engine.prefix_cache import PrefixCache

from .fake_runner import FakeRunner


def keep(cache: PrefixCache, runner: FakeRunner, seq: int, tokens: list[int]) -> None:
    runner.add_sequence(seq)
    for start in range(0, len(tokens), 16):
        runner.forward([(seq, tokens[start : start + 16])])
    cache.insert(seq, tokens)


def cache_of(*sequences: list[int], pages: int = 64) -> tuple[PrefixCache, FakeRunner]:
    runner = FakeRunner(pages)
    cache = PrefixCache(runner)
    for seq, tokens in enumerate(sequences):
        keep(cache, runner, seq, tokens)
    return cache, runner


def test_the_longest_beginning_wins_to_the_token() -> None:
    cache, _ = cache_of([1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 9, 9, 9, 9], [7])
    assert cache.match([1, 2, 3, 4, 5, 6, 7], 100) == (0, 6)
    assert cache.match([1, 2, 3, 4, 5, 9, 8], 100) == (1, 6)
    assert cache.match([1, 2, 8], 100)[1] == 2
    assert cache.match([7, 8], 100) == (2, 1)
    assert cache.match([8], 100) == (-1, 0)
    assert cache.match([2, 3, 4], 100) == (-1, 0), "anchored at the start"
    assert cache.match([], 100) == (-1, 0)
    assert cache.match([1, 2, 3, 4], 2)[1] == 2
    assert cache.match([1, 2, 3, 4], 0) == (-1, 0)


def test_nothing_is_kept_twice() -> None:
    cache, runner = cache_of([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6], [1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6])
    assert len(cache) == 1 and list(runner.sequences) == [1]


def test_the_least_recently_used_goes_first() -> None:
    cache, runner = cache_of([1, 1, 1], [2, 2, 2], [3, 3, 3])
    cache.match([1, 1], 100)
    assert cache.evict() and list(runner.sequences) == [0, 2]
    assert cache.evict() and list(runner.sequences) == [0]
    assert cache.evict() and not cache.evict()
    assert runner.free_pages() == runner.num_pages


def test_what_is_in_use_survives_the_eviction_of_its_parent() -> None:
    cache, runner = cache_of(list(range(20)))
    runner.fork_sequence(0, 9, 18)
    assert cache.evict()
    assert runner.history(9) == list(range(18))


def test_against_a_plain_search() -> None:
    chance = random.Random(3)
    for _ in range(60):
        runner = FakeRunner(400)
        cache = PrefixCache(runner)
        for seq in range(30):
            tokens = [chance.randrange(2) for _ in range(chance.randrange(1, 20))]
            if chance.random() < 0.3:
                cache.evict()
            keep(cache, runner, seq, tokens)
            assert set(cache._tokens) == set(runner.sequences)
            kept = [tuple(runner.history(seq)) for seq in runner.sequences]
            assert not any(a != b and a == b[: len(a)] for a in kept for b in kept)
            prompt = [chance.randrange(2) for _ in range(chance.randrange(0, 20))]
            best = max((common(prompt, other) for other in kept), default=0)
            found, length = cache.match(prompt, 100)
            assert length == best
            assert not length or runner.history(found)[:length] == prompt[:length]


def common(a: list[int], b: tuple[int | None, ...]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
