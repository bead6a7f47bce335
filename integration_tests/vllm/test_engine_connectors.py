"""vLLM's own KV connectors on the real engine: what is found locally and what is found elsewhere stay apart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from engines import FIX, NO_GROWTH, SENT, TRUE_HITS, run, without_and_with

from kvmend_fixes.demos._scenarios import DEFERRING_CONNECTOR, KV_PRESSURE

pytestmark = pytest.mark.engine


def shared_storage(folder: Path) -> dict[str, Any]:
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which another engine has stored the KV of all prompts."""
    folder = tmp_path_factory.mktemp("shared")
    ran = run(folder / "engine", NO_GROWTH, multiprocessing=False, kv_transfer_config=shared_storage(folder / "kv"))
    assert ran.counted == (SENT, TRUE_HITS, TRUE_HITS)
    assert ran.external["hits"] == 0
    return folder / "kv"


def test_with_shared_storage_a_prefix_that_another_engine_stored_is_no_local_hit(tmp_path: Path, storage: Path) -> None:
    """Catches external hits among the local ones, and lookups counted for refused admissions with a connector."""
    connector = shared_storage(storage)
    without, mended = without_and_with(tmp_path, NO_GROWTH, multiprocessing=False, kv_transfer_config=connector)
    # The first request finds the 128 shared tokens in the storage, everybody else finds them here.
    assert mended.external["hits"] == 128
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS + 128)
    assert without.counted == (24_192, 18_304, TRUE_HITS + 128)
    assert without.external == mended.external


def test_with_several_connectors_one_that_does_not_know_yet_costs_no_count(tmp_path: Path, storage: Path) -> None:
    """Catches a lookup that is counted although one of the connectors answered None."""
    deferring = DEFERRING_CONNECTOR.engine["kv_transfer_config"]
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [deferring, shared_storage(storage)]},
    }
    without, mended = without_and_with(tmp_path, NO_GROWTH, multiprocessing=False, kv_transfer_config=connector)
    assert mended.external["hits"] == 128
    assert mended.counted == (SENT, TRUE_HITS, TRUE_HITS + 128)
    assert without.counted == (47_880, 36_352, TRUE_HITS + 128)
    assert without.external == mended.external


def test_with_kv_offloading_an_asynchronous_load_is_counted_once(tmp_path: Path) -> None:
    """Catches a second count when the load is in, and counts while a request waits for its transfers.

    The connector and its scheduler side are vLLM's; its worker side takes no CPU, so that part is ours.
    """
    twice = dataclasses.replace(KV_PRESSURE, different=24)
    connector = {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "HostOffloadingSpec",
            "spec_module_path": "engine_offloading",
            "cpu_bytes_to_use": 100_000_000,
        },
    }
    without, mended = without_and_with(tmp_path, twice, multiprocessing=False, kv_transfer_config=connector)
    assert mended.external["hits"] > 0
    assert mended.reading.queries == SENT
    assert mended.reading.hits + mended.external["hits"] == mended.reading.true_hits
    assert mended.root.outcomes[FIX] == "applied"
    assert without.reading.queries > SENT
    assert without.reading.true_hits == mended.reading.true_hits
    assert without.external == mended.external
