import pytest

from kombu_fdb import InvalidArgument


@pytest.mark.parametrize("verb", ["peek", "page"])
def test_a_misspelt_state_is_not_an_empty_queue(broker, verb):
    jobs = broker.queue("jobs")
    jobs.put("build 42")
    with pytest.raises(InvalidArgument, match="Known states: ready, delayed, leased"):
        getattr(jobs, verb)(3, state="dealyed")
    assert getattr(jobs, verb)(3, state="ready")
