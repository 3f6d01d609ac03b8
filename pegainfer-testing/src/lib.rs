//! Helpers of the unit tests of several crates.
//!
//! ```
//! use pegainfer_testing::{Rng, TempDir, model_dir, seed};
//!
//! let dir = TempDir::new("example");
//! let source = model_dir().join("config.json");
//! std::fs::copy(source, dir.path().join("config.json")).unwrap();
//! assert!(Rng(seed()).below(10) < 10);
//! ```

#![allow(clippy::unwrap_used, reason = "only tests call this crate")]

pub mod gguf;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// Directory of the bundled checkpoint.
pub fn model_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/qwen3-tiny")
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
