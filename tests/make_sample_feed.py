"""Write jobs/sample_feed.tsv: a supplier's feed of 24,000 made-up records, always the same bytes.

`python tests/make_sample_feed.py` writes it anew; tests/test_sample_feed.py compares it.
Only `Random.random()` is used: the one method whose sequence Python promises to keep.
"""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from random import Random

FEED = Path(__file__).resolve().parent.parent / "jobs" / "sample_feed.tsv"
RECORDS = 24_000
HEADER = "sku\tname\tquantity\tprice\tupdated_at\n"
FIRST_CHANGE = datetime(2025, 11, 3, 6, 0)  # noqa: DTZ001 - the supplier writes no zone

GROUPS = {  # prefix of the sku -> (things, sizes, price from, price to)
    "BO": (("Hex bolt", "Carriage bolt", "Eye bolt"), ("M4", "M5", "M6", "M8", "M10"), 0.04, 1.9),
    "BR": (("Ball bearing", "Needle bearing", "Bush"), ("608", "6001", "6202", "6305"), 1.2, 39.0),
    "CH": (("Drive chain", "Chain link", "Sprocket"), ("1/2 in", "5/8 in", "3/4 in"), 2.5, 85.0),
    "FI": (("Oil filter", "Air filter", "Fuel filter"), ("short", "long", "wide"), 3.9, 48.0),
    "GA": (("Gasket", "O-ring", "Shaft seal"), ("12 mm", "18 mm", "25 mm", "40 mm"), 0.1, 7.5),
    "TO": (("Spanner", "Socket", "Pliers", "Clamp"), ("8 mm", "13 mm", "19 mm"), 4.0, 120.0),
}
FINISHES = ("zinc", "brass", "stainless", "black", "nylon", "galvanised", "raw")


def feed(records: int = RECORDS, seed: int = 20251103) -> Iterator[str]:
    """Yield the header and the records, each with its line end; one sku each, in no order of time.

    About 1 in 12 is out of stock, and 1 in 150 has no price (an empty field, "on request").
    """
    random = Random(seed)  # noqa: S311 - a made-up feed, not a secret

    def below(limit: int) -> int:
        return int(random.random() * limit)

    def one_of(choices: Sequence[str]) -> str:
        return choices[below(len(choices))]

    yield HEADER
    number = 10_000
    for _ in range(records):
        number += 1 + below(3)  # suppliers drop articles: the numbers have gaps
        prefix = one_of(tuple(GROUPS))
        things, sizes, cheapest, dearest = GROUPS[prefix]
        name = f"{one_of(things)}, {one_of(sizes)}, {one_of(FINISHES)}"
        quantity = 0 if below(12) == 0 else 1 + int(random.random() ** 3 * 2_500)
        cents = round((cheapest + random.random() ** 2 * (dearest - cheapest)) * 100)
        price = "" if below(150) == 0 else f"{cents // 100}.{cents % 100:02}"
        changed = FIRST_CHANGE + timedelta(minutes=below(60 * 24 * 120))
        yield f"{prefix}-{number}\t{name}\t{quantity}\t{price}\t{changed:%Y-%m-%d %H:%M}\n"


if __name__ == "__main__":
    FEED.write_text("".join(feed()), encoding="ascii", newline="\n")
