//! Helpers of the unit tests.

use crate::text::Tokenizer;
use pegainfer_core::ledger::Ledger;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Directory of the bundled checkpoint.
pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny")
}

/// A ledger of Qwen3-4B on an H200 that stays as it is, unlike those of the repository.
pub fn ledger() -> Ledger {
    Ledger::read(include_str!("../tests/fixtures/ledgers/h200-qwen3-4b.jsonl").as_bytes()).unwrap()
}

/// Tokenizer of the bundled checkpoint.
pub fn tokenizer() -> Tokenizer {
    Tokenizer::load(&model_dir()).unwrap()
}

/// Cases of the reference fixture.
pub fn fixture_cases() -> Vec<Value> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pegainfer-qwen3-4b/tests/fixtures/qwen3-tiny.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    fixture["cases"].as_array().unwrap().clone()
}

/// The seed of randomised tests; `PEGAINFER_TEST_SEED` replays another one.
pub fn seed() -> u64 {
    std::env::var("PEGAINFER_TEST_SEED").ok().and_then(|s| s.parse().ok()).unwrap_or(20261121)
}

/// splitmix64 pseudo-random numbers, for the choice of test cases.
pub struct Rng(pub u64);

impl Rng {
    /// A random number below `limit`.
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }
}

/// A directory that is removed when the value is dropped.
pub struct TempDir(PathBuf);

impl TempDir {
    /// A new, empty directory.
    pub fn new(name: &str) -> Self {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("pegainfer-{name}-{}-{count}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
