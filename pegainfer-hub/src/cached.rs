//! The models in the cache.

use super::cache::RepoCache;
use super::complete::{INDEX, complete};
use super::hub::Hub;
use super::segment_map::SegmentMap;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Read, Result};
use std::path::{Path, PathBuf};

/// Prefix of the names of models' directories.
const PREFIX: &str = "models--";
/// Maximum size of the header of a safetensors file, in bytes.
const MAX_HEADER: u64 = 100_000_000;

/// A model in the cache.
#[derive(Debug, Clone)]
pub struct CachedModel {
    /// Its id, `organisation/name`.
    pub id: String,
    /// Bytes of its files on the disk.
    pub bytes: u64,
    /// The directory of the last downloaded commit; `None` if its config.json is missing.
    pub snapshot: Option<PathBuf>,
    /// Fraction of its bytes that are there, in percent: 100 only if nothing is missing.
    pub percent: u64,
    dir: PathBuf,
}

impl Hub {
    /// The models in the cache, by name.
    ///
    /// # Errors
    /// The directory cannot be read. A missing directory has no models.
    pub fn cached(&self) -> Result<Vec<CachedModel>> {
        let entries = match fs::read_dir(&self.cache) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            entries => entries?,
        };
        let mut models = Vec::new();
        for entry in entries {
            let entry = entry?;
            let id = entry.file_name().to_str().and_then(id_of);
            if let Some(id) = id.filter(|_| entry.path().is_dir()) {
                models.push(self.model(id, entry.path()));
            }
        }
        models.sort_by(|a, b| a.id.cmp(&b.id));
        Ok(models)
    }

    fn model(&self, id: String, dir: PathBuf) -> CachedModel {
        let repo = RepoCache::new(&self.cache, &id);
        let commit = repo.newest_commit();
        let snapshot = commit.as_deref().and_then(|commit| complete(&repo, commit, false));
        let is_complete = commit.is_some_and(|commit| complete(&repo, &commit, true).is_some());
        let bytes = bytes(&dir);
        let total = || snapshot.as_deref().and_then(|snapshot| total_bytes(&dir, snapshot)).unwrap_or(0);
        let percent = if is_complete { 100 } else { (bytes * 100).checked_div(total()).unwrap_or(0).min(99) };
        CachedModel { id, bytes, snapshot, percent, dir }
    }
}

impl CachedModel {
    /// Deletes the model.
    ///
    /// # Errors
    /// The directory cannot be deleted.
    pub fn remove(&self) -> Result<()> {
        // Rename it first, so that other commands never find half of it.
        let doomed = self.dir.with_file_name(format!(".removed-{}-{}", self.id.replace('/', "--"), std::process::id()));
        fs::rename(&self.dir, &doomed)?;
        fs::remove_dir_all(&doomed)
            .map_err(|error| Error::new(error.kind(), format!("the rest is in {}: {error}", doomed.display())))
    }
}

fn id_of(folder: &str) -> Option<String> {
    folder.strip_prefix(PREFIX).map(|name| name.replacen("--", "/", 1))
}

/// Bytes of the weights of an incomplete model, as its index or the header of its partial file says.
fn total_bytes(dir: &Path, snapshot: &Path) -> Option<u64> {
    if let Ok(index) = fs::read_to_string(snapshot.join(INDEX)) {
        let index: Value = serde_json::from_str(&index).ok()?;
        return index["metadata"]["total_size"].as_u64();
    }
    let files = fs::read_dir(dir.join("blobs")).ok()?.flatten().map(|entry| entry.path());
    let size = |path: PathBuf| match path.extension()?.to_str()? {
        "incomplete" => file_bytes(&path),
        "map" => SegmentMap::read(&path).map(|map| map.size),
        _ => None,
    };
    files.filter_map(size).max()
}

/// Size of a whole safetensors file, from the header in its first part.
fn file_bytes(path: &Path) -> Option<u64> {
    let mut file = File::open(path).ok()?;
    let mut length = [0; 8];
    file.read_exact(&mut length).ok()?;
    let length = u64::from_le_bytes(length);
    let mut header = Vec::new();
    file.take(length.min(MAX_HEADER)).read_to_end(&mut header).ok()?;
    let tensors: BTreeMap<String, Value> = serde_json::from_slice(&header).ok()?;
    let end = tensors.values().filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max()?;
    end.checked_add(8)?.checked_add(length)
}

/// Bytes of the files below a directory. Links count nothing, because their targets are also below it.
fn bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes(&entry.path()),
        Ok(found) if found.is_file() => match entry.path().extension().and_then(|end| end.to_str()) {
            // A sparse file of the whole size, and the map of what is there.
            Some("segments") => 0,
            Some("map") => SegmentMap::read(&entry.path()).map_or(0, |map| map.present()),
            _ => found.len(),
        },
        _ => 0,
    };
    entries.map(size).sum()
}
