"""The catalog knows what the RAM tiers hold and until when."""

from tests.golden import refused
from tieredkv.cache.catalog import Catalog, Entry
from tieredkv.errors import IntegrityError
from tieredkv.retention import IN_MEMORY, TWENTY_FOUR_HOURS, RetentionPolicies, RetentionPolicy
from tieredkv.tier import BlockLife, Lent
from tieredkv.types import BlockHash, BlockRecord, Tier

NOW = 1_000_000.0
DAY_S = 86_400.0


def make_catalog(*more: RetentionPolicy) -> Catalog:
    return Catalog(RetentionPolicies([IN_MEMORY, TWENTY_FOUR_HOURS, *more]))


def make_entry(number: int = 0, retention: str = "in_memory", computed_at: float = NOW) -> Entry:
    return Entry(
        block_hash=BlockHash(b"%032d" % number),
        parent_hash=BlockHash(b"p" * 32),
        root=BlockHash(b"r" * 32),
        namespace=b"ns",
        position=0,
        computed_at=computed_at,
        last_used=computed_at,
        claims=frozenset({retention}),
    )


def make_record(retention: str = "24h", computed_at: float = NOW) -> BlockRecord:
    catalog = make_catalog()
    entry = make_entry(retention="24h", computed_at=computed_at)
    record = catalog.record(entry, size_bytes=64, expires_at=computed_at + DAY_S)
    return BlockRecord(
        **{name: getattr(record, name) for name in record.__struct_fields__}
        | {"retention": retention}
    )


def test_a_block_keeps_the_longer_of_the_policies_that_asked_for_it() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry())
    assert catalog.deadline(entry) == NOW + 600
    catalog.claim([entry], {"24h"}, NOW + 1)
    catalog.claim([entry], {"in_memory"}, NOW + 2)
    assert catalog.deadline(entry) == NOW + DAY_S
    catalog.check()


def test_a_deadline_is_exact() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry())
    assert not catalog.is_expired(entry, NOW + 599.999)
    assert catalog.is_expired(entry, NOW + 600)


def test_due_names_each_expired_entry_once_and_leaves_the_others_queued() -> None:
    catalog = make_catalog()
    first = catalog.add(make_entry(1))
    catalog.add(make_entry(1))
    second = catalog.add(make_entry(2))
    catalog.claim([second], {"in_memory"}, NOW + 500)
    assert catalog.due(NOW + 600).expired == [first]
    catalog.forget(first.block_hash, "evicted_host")
    catalog.check()
    assert catalog.due(NOW + 1099).expired == []
    assert catalog.due(NOW + 1100).expired == [second]


def test_an_entry_that_comes_back_in_its_second_is_queued_once() -> None:
    catalog = make_catalog()
    first, second = catalog.add_all([make_entry(number) for number in range(2)])
    assert catalog.due(NOW + 600, 1).expired == [first]
    catalog.forget(second.block_hash, "admin")
    second = catalog.add(make_entry(1))
    assert catalog.due(NOW + 600, 1).expired == [second]
    for entry in (first, second):
        catalog.forget(entry.block_hash, "expired")
    catalog.check()
    assert catalog.num_queued == 0


def test_entries_due_at_once_are_named_a_few_at_a_time_and_each_once() -> None:
    catalog = make_catalog()
    entries = catalog.add_all([make_entry(number) for number in range(10)])
    assert catalog.due(NOW + 600, 4).expired == entries[:4] and catalog.is_behind
    for entry in entries[:6]:
        catalog.forget(entry.block_hash, "expired")
    catalog.check()
    again = catalog.add(make_entry(4, computed_at=NOW + 600))
    assert catalog.due(NOW + 600, 4).expired == entries[6:]
    catalog.due(NOW + 600, 4)
    assert not catalog.is_behind
    assert catalog.due(NOW + 1200).expired == [again]


def test_within_a_second_nothing_is_due_before_its_time() -> None:
    catalog = make_catalog()
    late, early = (
        catalog.add(make_entry(i, computed_at=NOW + at)) for i, at in ((1, 0.9), (2, 0.2))
    )
    assert catalog.due(NOW + 600.1).expired == []
    catalog.check()
    assert catalog.due(NOW + 600.5).expired == [early]
    catalog.forget(early.block_hash, "expired")
    catalog.check()
    assert catalog.due(NOW + 600.95).expired == [late]


def test_an_entry_that_left_and_came_back_is_due_once() -> None:
    catalog = make_catalog()
    catalog.add(make_entry(1))
    catalog.forget(make_entry(1).block_hash, "evicted_host")
    again = catalog.add(make_entry(1))
    assert catalog.due(NOW + 600).expired == [again]


def test_the_queue_of_deadlines_follows_what_is_held_not_what_passed_through() -> None:
    catalog = make_catalog()
    for number in range(10_000):
        entry = catalog.add(make_entry(number, "24h"))
        catalog.forget(entry.block_hash, "evicted_host")
    kept = catalog.add(make_entry(1, "24h"))
    assert catalog.num_queued < 100
    assert catalog.due(NOW + DAY_S).expired == [kept]


def test_a_second_copy_never_makes_a_block_younger() -> None:
    catalog = make_catalog()
    catalog.add(make_entry(computed_at=NOW))
    entry = catalog.add(make_entry(retention="24h", computed_at=NOW - 1000))
    catalog.check()
    assert entry.computed_at == NOW - 1000
    assert catalog.deadline(entry) == NOW - 1000 + DAY_S


def from_disk(catalog: Catalog, record: BlockRecord) -> Entry:
    return catalog.entry_of(Lent.of(record, 0), BlockLife.of(record))


def test_a_block_from_disk_counts_its_age_from_its_compute() -> None:
    catalog = make_catalog()
    entry = catalog.add(from_disk(catalog, make_record(computed_at=NOW - 5000)))
    assert entry.is_on_disk
    catalog.claim([entry], {"24h"}, NOW)
    assert catalog.deadline(entry) == NOW - 5000 + DAY_S


def test_a_record_of_an_unknown_retention_lives_as_long_as_the_record_says() -> None:
    catalog = make_catalog()
    entry = catalog.add(from_disk(catalog, make_record(retention="7d")))
    assert catalog.deadline(entry) == NOW + DAY_S
    assert catalog.disk_deadline(entry, NOW) is None
    catalog.claim([entry], {"in_memory"}, NOW)
    catalog.check()
    assert catalog.deadline(entry) == NOW + DAY_S, "a claim shortened its life"


def test_only_claims_that_allow_the_disk_open_it() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry())
    assert catalog.disk_deadline(entry, NOW) is None
    assert not catalog.may_enter(entry.claims, Tier.DISK)
    assert catalog.may_enter(entry.claims, Tier.HOST)
    catalog.claim([entry], {"24h"}, NOW + 10)
    assert catalog.disk_deadline(entry, NOW + 10) == NOW + DAY_S
    assert catalog.disk_deadline(entry, NOW + DAY_S) is None


def test_a_record_for_the_disk_names_a_retention_that_allows_the_disk() -> None:
    week = RetentionPolicy(
        name="week in RAM",
        idle_s=7 * DAY_S,
        absolute_s=7 * DAY_S,
        tiers=frozenset({Tier.DEVICE, Tier.HOST}),
    )
    catalog = make_catalog(week)
    entry = catalog.add(make_entry(retention="24h"))
    catalog.claim([entry], {"week in RAM"}, NOW)
    assert catalog.record(entry, size_bytes=64, expires_at=NOW + 1).retention == "24h"
    assert catalog.disk_deadline(entry, NOW) == NOW + DAY_S


def test_a_new_claim_gives_a_block_that_could_not_be_written_another_chance() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry(retention="24h"))
    entry.is_droppable = True
    catalog.claim([entry], {"24h"}, NOW)
    assert not entry.is_droppable


def test_check_finds_an_entry_that_the_sweep_would_miss() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry())
    entry.computed_at -= 3500
    with refused(IntegrityError):
        catalog.check()


def test_check_finds_an_entry_under_another_key() -> None:
    catalog = make_catalog()
    entry = catalog.add(make_entry(1))
    entry.block_hash = make_entry(2).block_hash
    with refused(IntegrityError):
        catalog.check()
