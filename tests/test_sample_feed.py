"""The shipped sample feed is what its generator writes, and looks like a supplier's."""

from make_sample_feed import FEED, HEADER, RECORDS, feed


def test_the_shipped_feed_is_byte_for_byte_what_the_generator_writes() -> None:
    assert FEED.read_bytes() == "".join(feed()).encode("ascii")


def test_the_feed_has_a_header_five_columns_and_one_record_for_each_sku() -> None:
    header, *lines = FEED.read_text(encoding="ascii").splitlines(keepends=True)
    records = [line.removesuffix("\n").split("\t") for line in lines]
    assert header == HEADER
    assert len(records) == RECORDS
    assert {len(record) for record in records} == {5}
    assert len({record[0] for record in records}) == RECORDS


def test_another_seed_gives_another_feed() -> None:
    assert list(feed(records=10, seed=1)) != list(feed(records=10, seed=2))
