//! The models in the cache.

use super::Hub;
use super::cache::RepoCache;
use super::complete::complete;
use super::gguf::MAIN;
use std::fs;
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};

/// Prefix of the names of models' directories.
const PREFIX: &str = "models--";

/// A model in the cache.
#[derive(Debug, Clone)]
pub struct CachedModel {
    /// Its id, `organisation/name`.
    pub id: String,
    /// Bytes of its files on the disk.
    pub bytes: u64,
    /// The directory of the last downloaded commit; `None` if its config.json is missing.
    pub snapshot: Option<PathBuf>,
    /// True if all of its weights are there.
    pub is_complete: bool,
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
        let commit = repo.commit(MAIN);
        let snapshot = commit.as_deref().and_then(|commit| complete(&repo, commit, false));
        let is_complete = commit.is_some_and(|commit| complete(&repo, &commit, true).is_some());
        CachedModel { id, bytes: bytes(&dir), snapshot, is_complete, dir }
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

/// Bytes of the files below a directory. Links count nothing, because their targets are also below it.
fn bytes(dir: &Path) -> u64 {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let size = |entry: fs::DirEntry| match entry.metadata() {
        Ok(found) if found.is_dir() => bytes(&entry.path()),
        Ok(found) if found.is_file() => found.len(),
        _ => 0,
    };
    entries.map(size).sum()
}
