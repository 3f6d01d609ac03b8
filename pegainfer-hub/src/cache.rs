//! The directories of Hugging Face's cache: `blobs/HASH`, `snapshots/COMMIT/NAME` with links to them, `refs/main`.
//!
//! Every path consists of the repository's id, fixed names, and checked hexadecimal digits.

use super::listing::{FileInfo, Hash, is_file_name, is_hex};
use super::segment_map::SegmentMap;
use super::source::MAIN;
use std::fs::{self, File, TryLockError};
use std::io::{Error, ErrorKind, Result};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The cache of one repository.
pub(super) struct RepoCache {
    dir: PathBuf,
    locks: PathBuf,
}

impl RepoCache {
    /// The cache of repository `id` (`organisation/name`).
    pub(super) fn new(cache: &Path, id: &str) -> Self {
        let folder = format!("models--{}", id.replace('/', "--"));
        Self { locks: cache.join(".locks").join(&folder), dir: cache.join(folder) }
    }

    /// Directory with the files of a commit.
    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.dir.join("snapshots").join(commit)
    }

    /// Path of a file's content.
    pub(super) fn blob(&self, hash: &Hash) -> PathBuf {
        self.dir.join("blobs").join(hash.digits())
    }

    /// Path of a file's content while it is downloaded.
    pub(super) fn partial(&self, hash: &Hash) -> PathBuf {
        self.blob(hash).with_added_extension("incomplete")
    }

    /// Path of a file's content while it is downloaded in segments, which no other program takes for its beginning.
    pub(super) fn segments(&self, hash: &Hash) -> PathBuf {
        self.blob(hash).with_added_extension("segments")
    }

    /// Path of the map of the segments that are there.
    pub(super) fn segment_map(&self, hash: &Hash) -> PathBuf {
        self.blob(hash).with_added_extension("map")
    }

    /// True if a file's content is complete. Its hash was checked before it was renamed; the size is compared in case
    /// another program wrote it.
    pub(super) fn has(&self, info: &FileInfo) -> bool {
        fs::metadata(self.blob(&info.hash)).is_ok_and(|file| file.is_file() && file.len() == info.size)
    }

    /// Bytes of a file's content that are there, complete or partial.
    pub(super) fn present(&self, info: &FileInfo) -> u64 {
        if self.has(info) {
            return info.size;
        }
        if let Some(map) = SegmentMap::read(&self.segment_map(&info.hash)).filter(|map| map.size == info.size) {
            return map.present();
        }
        let partial = fs::metadata(self.partial(&info.hash)).map_or(0, |file| file.len());
        if partial <= info.size { partial } else { 0 }
    }

    /// The last downloaded commit of a revision, which may be a commit itself.
    pub(super) fn commit(&self, revision: &str) -> Option<String> {
        if is_hex(revision, 40) {
            return Some(revision.to_owned());
        }
        let commit =
            fs::read_to_string(self.dir.join("refs").join(Some(revision).filter(|name| is_file_name(name))?)).ok()?;
        Some(commit.trim().to_string()).filter(|commit| is_hex(commit, 40))
    }

    /// The last downloaded commit of `main`, or else the commit of the newest snapshot, which may be incomplete.
    pub(super) fn newest_commit(&self) -> Option<String> {
        let newest = || {
            let entries = fs::read_dir(self.dir.join("snapshots")).ok()?.flatten();
            let newest = entries.max_by_key(|entry| entry.metadata().and_then(|data| data.modified()).ok())?;
            newest.file_name().into_string().ok().filter(|commit| is_hex(commit, 40))
        };
        self.commit(MAIN).or_else(newest)
    }

    /// Records the last downloaded commit of a revision.
    pub(super) fn record(&self, revision: &str, commit: &str) -> Result<()> {
        if is_hex(revision, 40) {
            return Ok(());
        }
        if !is_file_name(revision) {
            return Err(ErrorKind::InvalidInput.into());
        }
        let refs = self.dir.join("refs");
        fs::create_dir_all(&refs)?;
        let new = temporary(&refs);
        fs::write(&new, commit)?;
        fs::rename(new, refs.join(revision))
    }

    /// Locks a content against other processes, including huggingface_hub; waits for the lock.
    pub(super) fn lock(&self, hash: &Hash, name: &str) -> Result<File> {
        fs::create_dir_all(&self.locks)?;
        fs::create_dir_all(self.dir.join("blobs"))?;
        let path = self.locks.join(format!("{}.lock", hash.digits()));
        let file = File::options().create(true).append(true).open(path)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                log::info!("another process downloads {name}; waiting for it");
                file.lock()?;
            }
            // Some network file systems have no locks. The hash is checked anyway.
            Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Unsupported => {
                log::warn!("the cache's file system has no locks: start one process at a time until {name} is there");
            }
            Err(TryLockError::Error(error)) => return Err(error),
        }
        Ok(file)
    }

    /// Links `name` in the commit's snapshot to the content, and returns its path.
    pub(super) fn link(&self, commit: &str, name: &str, hash: &Hash) -> Result<PathBuf> {
        let path = self.snapshot(commit).join(name);
        let parent = path.parent().ok_or_else(|| Error::from(ErrorKind::InvalidInput))?;
        let up = "../".repeat(2 + name.matches('/').count());
        let target = PathBuf::from(format!("{up}blobs/{}", hash.digits()));
        if fs::read_link(&path).is_ok_and(|present| present == target) {
            return Ok(path);
        }
        fs::create_dir_all(parent)?;
        let new = temporary(parent);
        #[cfg(unix)]
        std::os::unix::fs::symlink(&target, &new)?;
        // Symbolic links need rights on Windows that users seldom have.
        #[cfg(not(unix))]
        fs::hard_link(self.blob(hash), &new)?;
        fs::rename(new, &path)?;
        Ok(path)
    }
}

/// An unused path in `dir`, to be renamed to its final name.
fn temporary(dir: &Path) -> PathBuf {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let path = dir.join(format!(".new-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed)));
    // An earlier process with the same id may have left it.
    let _ = fs::remove_file(&path);
    path
}
