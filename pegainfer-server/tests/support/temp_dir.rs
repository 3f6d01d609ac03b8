//! A directory that is removed at the end of a test.

use std::path::PathBuf;

/// A new directory inside the system's temporary directory.
pub struct TempDir(pub PathBuf);

impl TempDir {
    /// A directory with `name`, which distinguishes the directories of one process.
    pub fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("pegainfer-test-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}
