//! Complete models in the cache, which are served without a network.

use super::cache::RepoCache;
use super::gguf::{self, ModelId};
use super::listing::is_file_name;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const SINGLE: &str = "model.safetensors";

/// The model of the recorded commit of a revision, if it is complete: its directory, or the first GGUF file of the
/// quantisation.
pub(super) fn model(repo: &RepoCache, id: ModelId<'_>, weights: bool) -> Option<PathBuf> {
    let commit = repo.commit(id.revision)?;
    let Some(quantization) = id.quantization else { return complete(repo, &commit, weights) };
    let dir = repo.snapshot(&commit);
    let files = gguf::files(&dir);
    let names = gguf::choose(files.iter().map(String::as_str), quantization).ok()?;
    names.iter().all(|name| dir.join(name).is_file()).then(|| dir.join(&names[0]))
}

/// The directory of a commit, if it has the files that serving needs.
pub(super) fn complete(repo: &RepoCache, commit: &str, weights: bool) -> Option<PathBuf> {
    let dir = repo.snapshot(commit);
    let has = |name: &str| dir.join(name).is_file();
    let index = dir.join(INDEX);
    let shards = || match index.is_file() {
        true => read_index(&index).is_ok_and(|shards| shards.iter().all(|shard| has(shard))),
        false => has(SINGLE),
    };
    let is_safetensors = has("config.json") && (!weights || shards());
    (is_safetensors || !gguf::files(&dir).is_empty()).then_some(dir)
}

/// The shard files named by an index.
pub(super) fn read_index(path: &Path) -> Result<BTreeSet<String>, String> {
    let text = std::fs::read_to_string(path).map_err(|e| e.to_string())?;
    let index: Value = serde_json::from_str(&text).map_err(|e| format!("it is not valid JSON: {e}"))?;
    let map = index["weight_map"].as_object().ok_or("it has no weight_map")?;
    let shard = |file: &Value| match file.as_str() {
        Some(name) if is_file_name(name) => Ok(name.to_string()),
        _ => Err(format!("its weight_map names {file}, which is not a file name")),
    };
    map.values().map(shard).collect()
}
