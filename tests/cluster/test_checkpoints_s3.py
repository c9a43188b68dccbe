"""Checkpoints in a bucket: the server may go away and come back, and nothing that was saved is lost."""

from support.checkpoints import SmallRun, newest

from dure.checkpoint.find import entries
from dure.storage import open_store


def test_a_server_that_is_stopped_and_started_costs_one_checkpoint(s3):
    store = open_store(s3.make_bucket("dure-checkpoints") + "/run")
    run = SmallRun(store)
    assert run.save(1).trouble is None
    s3.stop()
    outcome = run.save(2)
    assert outcome.name is None
    assert "is it running" in outcome.trouble
    s3.start()
    assert newest(store) == (1, [])
    for step in (3, 4, 5):
        assert run.save(step).trouble is None
    assert newest(store) == (5, [])
    assert [entry.manifest.step for entry in entries(store, deep=True)] == [5, 4]
    left = [name for name in store.names("") if store.names(name)]
    assert len(left) == 2, "old ones and half-written ones are gone"


def test_a_damaged_part_in_a_bucket_is_found_and_the_one_before_used(s3):
    store = open_store(s3.make_bucket("dure-damaged") + "/run")
    run = SmallRun(store)
    run.save(1)
    name = run.save(2).name
    part = f"{name}/part-0-of-1.safetensors"
    content = bytearray(store.read(part, 0, store.size(part)))
    content[-5] ^= 16
    store.write_whole(part, [content])
    step, told = newest(store)
    assert step == 1
    assert "is damaged" in told[0]
