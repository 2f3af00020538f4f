"""Document affinity: the last slot of each document, the least recently used document forgotten first."""

from gateway.pool.affinity import DocumentAffinity


def test_requests_without_a_document_have_no_slot() -> None:
    affinity = DocumentAffinity()
    affinity.remember(None, 1)
    assert affinity.slot_of(None) is None


def test_the_least_recently_used_document_is_forgotten() -> None:
    affinity = DocumentAffinity(max_documents=2)
    affinity.remember(1, 0)
    affinity.remember(2, 0)
    affinity.remember(1, 1)
    affinity.remember(3, 0)
    assert [affinity.slot_of(document) for document in (1, 2, 3)] == [1, None, 0]
