//! Reference outputs, and the checkpoints that they are of.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use std::path::{Path, PathBuf};

/// Another checkpoint to test than the bundled one.
pub fn other_model() -> Option<PathBuf> {
    std::env::var_os("PEGAINFER_TEST_MODEL_PATH").map(PathBuf::from)
}

/// The checkpoint `name` of the repository.
pub fn bundled_model(name: &str) -> PathBuf {
    crate_dir().join("../models").join(name)
}

/// Directory of the crate that includes this file: where cargo runs the test, or where it was built.
fn crate_dir() -> PathBuf {
    std::env::var_os("CARGO_MANIFEST_DIR").map_or_else(|| env!("CARGO_MANIFEST_DIR").into(), PathBuf::from)
}

/// Size of a cache: `bytes`, small enough to fill up, for the bundled model; the default for another one.
pub fn small_cache(bytes: u64) -> Option<u64> {
    other_model().is_none().then_some(bytes)
}

/// Reference outputs, see tests/fixtures/README.md.
#[derive(Deserialize)]
pub struct Fixture {
    pub cases: Vec<Case>,
    /// Allowed differences of a bf16 engine; the default is for the bundled model.
    #[serde(default)]
    pub limits: Limits,
}

impl Fixture {
    /// Fixture of the bundled checkpoint `name`.
    pub fn bundled(name: &str) -> Self {
        bundled_fixture(name)
    }

    /// Fixture of the checkpoint given by the environment, or of the bundled one.
    pub fn under_test(bundled: &str) -> Self {
        other_model().map_or_else(|| Self::bundled(bundled), |path| read(&path.join("fixture.json")))
    }
}

/// The file `name` of tests/fixtures.
pub fn bundled_fixture<T: DeserializeOwned>(name: &str) -> T {
    read(&fixtures().join(format!("{name}.json")))
}

/// The folder tests/fixtures.
pub fn fixtures() -> PathBuf {
    crate_dir().join("tests/fixtures")
}

fn read<T: DeserializeOwned>(path: &Path) -> T {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap()
}

/// Bounds of the difference from a reference in f32, nats.
#[derive(Clone, Copy, Deserialize)]
pub struct Limits {
    /// Gap between the reference's best two tokens above which the engine must agree.
    pub margin: f64,
    /// Mean error of a log-probability among the reference's top five.
    pub mean: f64,
    /// Largest such error.
    pub max: f64,
    /// Share of the steps that may be within the margin.
    pub close: f64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { margin: 0.05, mean: 0.03, max: 0.30, close: 0.1 }
    }
}

/// One prompt and its greedy continuation in f32.
#[derive(Deserialize)]
pub struct Case {
    pub name: String,
    pub prompt_ids: Vec<u32>,
    pub greedy_ids: Vec<u32>,
    pub margins: Vec<f64>,
    pub top20: Vec<Top>,
}

impl Case {
    /// Prompt and continuation.
    pub fn text(&self) -> Vec<u32> {
        [&self.prompt_ids[..], &self.greedy_ids].concat()
    }
}

/// The twenty most likely tokens at one position.
#[derive(Deserialize)]
pub struct Top {
    pub ids: Vec<u32>,
    pub logprobs: Vec<f64>,
}
