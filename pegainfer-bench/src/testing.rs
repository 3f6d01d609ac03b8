//! Helpers of the unit tests.

use pegainfer_core::ledger::Ledger;

/// A ledger of Qwen3-4B on an H200 that never changes, unlike those of the repository.
pub fn ledger() -> Ledger {
    Ledger::read(include_str!("../tests/fixtures/ledgers/h200-qwen3-4b.jsonl").as_bytes()).unwrap()
}
