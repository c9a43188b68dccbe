"""The benches of receipts and audits run, and count what they say."""

import pytest

from dure.proof.receipt import RECORD
from dure.tools.bench import audit, receipt
from dure.tools.bench.workload import Workload

SMALL = Workload(width=40, layers=1, vocabulary=64, seq=8)


def test_the_bench_of_receipts_counts_every_part_and_says_it_in_words():
    found = receipt.bench_receipt(ranks=2, rounds=2, steps=2, load=SMALL)
    parts = found["counted_cpu_seconds"]
    assert set(parts) == {"fingerprints", "exchange", "record", "root"}
    assert min(parts.values()) > 0
    assert found["bytes_per_step"] == RECORD
    assert f"{found['counted_percent']:.2f} %" in receipt.in_words(found)


@pytest.mark.soak
def test_the_bench_of_audits_audits_every_step_of_one_kind():
    found = audit.bench_audit(ranks=2, rounds=2, steps=2, load=SMALL)
    assert found["audited"] == (2 + 1) * 2
    assert f"{found['percent_at_share']:.3f} %" in audit.in_words(found)


@pytest.mark.soak
def test_a_receipt_takes_less_than_a_hundredth_of_the_cpu_seconds():
    assert receipt.bench_receipt(rounds=5)["counted_percent"] < 1.0
